/** The live workers. */

import { newBadge, setBadge } from "./badge.js";
import { newBlocks, setBlocks } from "./blocks.js";
import { setText } from "./element.js";
import { Table, actionButton, node, text } from "./table.js";
import { count, duration, plural, rate } from "./units.js";

function stateOf({ status, running, percent, order }) {
  if (status === "loading") return [`loading, ${percent} %`, "warn"];
  if (status === "draining" && order && order !== "serve") {
    if (running === 0) return ["drained", "idle"];
    return [order === "exit" ? "draining, then exits" : "draining by order", "warn"];
  }
  if (status !== "ok") return [status, status === "draining" ? "warn" : "bad"];
  if (running === undefined) return [status, "good"]; // shown to operators
  return running > 0 ? ["busy", "busy"] : ["idle", "good"];
}

/** A worker of an earlier release reads no orders. */
function setButton(button, { id, order, status }) {
  button.hidden = order === undefined || status === "loading"; // orders are shown to operators
  button.disabled = order === null;
  button.title = order === null ? "Its release reads no orders: stop its process with SIGTERM." : "";
  const verb = order === null || order === "serve" ? "Drain" : "Resume";
  setText(button, verb);
  button.setAttribute("aria-label", `${verb} worker ${id}`);
}

/** The models, who computes them, and the swaps of a worker that loads them when wanted. */
function modelsOf({ models, engine, engine_version: version, stage, model_swaps: swaps, model_load_error: error }) {
  if (stage) return `${models.join(", ")}: ${stage}`;
  const computedBy = { vllm: ` (vLLM ${version})`, http: ` (upstream: ${version})` };
  const swapped = swaps > 0 ? `, ${plural(swaps, "swap")}` : "";
  const failed = error ? `. Not loaded: ${error}` : "";
  return models.join(", ") + (computedBy[engine] ?? "") + swapped + failed;
}

/** The part of the looked-up prompt tokens that were in its prefix cache. */
function prefixHits({ prefix_query_tokens: lookedUp, prefix_hit_tokens: found }) {
  return lookedUp > 0 ? `${Math.round((100 * found) / lookedUp)} %` : "–";
}

/** How often sequences gave way to higher lanes, by their own: "6:3 7:1". */
const preempted = ({ lane_preemptions: byLane }) =>
  byLane ? `lane ${byLane.replaceAll(" ", ", lane ").replaceAll(":", ": ")}` : "–";

/** `onOrder(worker, button)` is called when a button is pressed. */
export const workerTable = (body, onOrder) =>
  new Table(
    body,
    [
      text("Worker", (worker) => worker.id, "id"),
      node("State", newBadge, (badge, worker) => setBadge(badge, ...stateOf(worker))),
      text("Models", modelsOf),
      text("Step", (worker) => count(worker.step), "number"),
      text("Running", (worker) => count(worker.running), "number"),
      text("Waiting", (worker) => count(worker.waiting), "number"),
      node("KV blocks in use", newBlocks, setBlocks),
      text("Prefix hits", prefixHits, "number"),
      text("Preempted", preempted),
      text("Tokens/s", (worker) => rate(worker.tok_s), "number"),
      text("Last heartbeat", (worker) => duration(worker.beat_age_ms), "number"),
      actionButton("Drain", onOrder, setButton),
    ],
    (worker) => worker.id,
  );

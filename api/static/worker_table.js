/** The live workers. */

import { newBadge, setBadge } from "./badge.js";
import { newBlocks, setBlocks } from "./blocks.js";
import { Table, node, text } from "./table.js";
import { count, duration, rate } from "./units.js";

function stateOf({ status, running, percent }) {
  if (status === "loading") return [`loading, ${percent} %`, "warn"];
  if (status !== "ok") return [status, status === "draining" ? "warn" : "bad"];
  if (running === undefined) return [status, "good"]; // shown to operators
  return running > 0 ? ["busy", "busy"] : ["idle", "good"];
}

export const workerTable = (body) =>
  new Table(
    body,
    [
      text((worker) => worker.id, "id"),
      node(newBadge, (badge, worker) => setBadge(badge, ...stateOf(worker))),
      text(({ models, engine, engine_version: version, stage }) => {
        if (stage) return `${models.join(", ")}: ${stage}`;
        return models.join(", ") + (engine === "vllm" ? ` (vLLM ${version})` : "");
      }),
      text((worker) => count(worker.step), "number"),
      text((worker) => count(worker.running), "number"),
      text((worker) => count(worker.waiting), "number"),
      node(newBlocks, setBlocks),
      text((worker) => rate(worker.tok_s), "number"),
      text((worker) => duration(worker.beat_age_ms), "number"),
    ],
    (worker) => worker.id,
  );

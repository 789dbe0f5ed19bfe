/** The live workers, as /health tells of them. */

import { newBadge, setBadge } from "./badge.js";
import { element, setText } from "./element.js";
import { Table, node, text } from "./table.js";
import { count, duration, rate } from "./units.js";

function stateOf({ status, running }) {
  if (status !== "ok") return [status, status === "draining" ? "warn" : "bad"];
  return running > 0 ? ["busy", "busy"] : ["idle", "good"];
}

function newBlocks() {
  const cell = element("span");
  const bar = element("progress");
  bar.setAttribute("aria-label", "KV blocks in use");
  cell.append(bar, element("span"));
  return cell;
}

/** Free blocks include the cached ones, whose content can still be hit. */
function setBlocks(cell, { total_blocks: total, free_blocks: free, cached_blocks: cached }) {
  const [bar, label] = cell.children;
  bar.max = total || 1;
  bar.value = total - free || 0;
  setText(label, `${count(total - free)} of ${count(total)}, ${count(cached)} cached`);
}

export const workerTable = (body) =>
  new Table(
    body,
    [
      text((worker) => worker.id, "id"),
      node(newBadge, (badge, worker) => setBadge(badge, ...stateOf(worker))),
      text(({ models, engine, engine_version: version }) =>
        models.join(", ") + (engine === "vllm" ? ` (vLLM ${version})` : ""),
      ),
      text((worker) => count(worker.step), "number"),
      text((worker) => count(worker.running), "number"),
      text((worker) => count(worker.waiting), "number"),
      node(newBlocks, setBlocks),
      text((worker) => rate(worker.tok_s), "number"),
      text((worker) => duration(worker.beat_age_ms), "number"),
    ],
    (worker) => worker.id,
  );

/** A worker's KV blocks as a small field of cells: in use, prefix-cached, free. */

import { element, setText } from "./element.js";
import { picture, setAll, svg } from "./svg.js";
import { count } from "./units.js";

const COLUMNS = 32;
const ROWS = 3;
const CELLS = COLUMNS * ROWS;
const KINDS = ["used", "cached", "free"];

export function newBlocks() {
  const cell = element("span", "kv");
  const field = picture("blocks", 4 * COLUMNS, 4 * ROWS);
  field.append(...KINDS.map((kind) => svg("path", { class: kind })));
  cell.append(field, element("span"));
  return cell;
}

/** Number of cells by kind; a kind with any block has at least one. */
function cellsOf(blocks, total) {
  const cells = Math.round((CELLS * blocks) / total);
  return blocks > 0 ? Math.max(1, cells) : 0;
}

/** Cells from one to another as a path, filled column by column. */
function pathOf(begin, end) {
  const parts = [];
  for (let at = begin; at < end; at += 1) {
    parts.push(`M${4 * Math.floor(at / ROWS)} ${4 * (at % ROWS)}h3v3h-3z`);
  }
  return parts.join("");
}

/** Free blocks include the cached ones, whose content can still be hit. */
export function setBlocks(cell, { total_blocks: total, free_blocks: free, cached_blocks: cached }) {
  const [field, label] = cell.children;
  field.classList.toggle("none", !total);
  if (!total) {
    setText(label, "–");
    setAll(field, { "aria-label": "KV blocks are not known" });
    return;
  }
  const used = total - free;
  const numUsed = cellsOf(used, total);
  const numCached = Math.min(cellsOf(cached, total), CELLS - numUsed);
  const ends = [numUsed, numUsed + numCached, CELLS];
  let begin = 0;
  for (const [index, end] of ends.entries()) {
    setAll(field.children[index], { d: pathOf(begin, end) });
    begin = end;
  }
  setAll(field, {
    "aria-label": `KV blocks: ${used} in use, ${cached} cached prefixes, ${free - cached} free`,
  });
  setText(label, `${count(used)} of ${count(total)}, ${count(cached)} cached`);
}

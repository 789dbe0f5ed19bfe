/** The overview: the numbers that matter, and the last hour. */

import { element, setText } from "./element.js";
import { rowsOf } from "./feed.js";
import { sparklines } from "./sparklines.js";
import { count, duration } from "./units.js";

function totalsOf(service) {
  return [
    ["Running", count(service.running)],
    ["Waiting", count(service.waiting)],
    ["Prompt tokens queued", count(service.queued_tokens)],
    ["Workers", count(service.workers)],
    ["Tokens per second", count(service.tokens_per_s)],
    ["Dead letters", count(service.dead_letters)],
    ["Redis round trip", duration(service.redis?.latency_ms)],
  ];
}

export function overviewTab(root) {
  const tiles = root.querySelector("#totals");
  const curves = sparklines(root.querySelector("#history"));

  function showTotals(totals) {
    for (const [index, [name, value]] of totals.entries()) {
      let tile = tiles.children[index];
      if (tile === undefined) {
        tile = element("div");
        tile.append(element("dt", "", name), element("dd"));
        tiles.append(tile);
      }
      setText(tile.lastChild, value);
    }
  }

  return {
    open: () => ({}),
    show: (state) => {
      showTotals(totalsOf(state.service));
      const slots = rowsOf(state, "history");
      if (slots !== null) curves.show(slots);
    },
  };
}

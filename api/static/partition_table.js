/** The partitions of Redis, where there are several. */

import { newBadge, setBadge } from "./badge.js";
import { Table, node, text } from "./table.js";
import { bytes, count } from "./units.js";

const stateOf = ({ is_away: isAway }) => (isAway ? ["away, its jobs wait", "bad"] : ["up", "good"]);

export const partitionTable = (body) =>
  new Table(
    body,
    [
      text("Partition", ({ partition }) => count(partition), "number"),
      node("State", newBadge, (badge, row) => setBadge(badge, ...stateOf(row))),
      text("Queued", ({ queued }) => count(queued), "number"),
      text("Running", ({ running }) => count(running), "number"),
      text("Memory of its server", ({ store_used: used }) => bytes(used), "number"),
      text("Limit", ({ store_limit: limit }) => (limit ? bytes(limit) : "none"), "number"),
    ],
    ({ partition }) => String(partition),
  );

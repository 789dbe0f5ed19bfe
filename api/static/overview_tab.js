/** The overview on one screen: the numbers that matter, what needs an operator, and the history. */

import { element, setText } from "./element.js";
import { rowsOf } from "./feed.js";
import { clockOf, plots } from "./plots.js";
import { Table, text } from "./table.js";
import { markCurrent, tabLink } from "./tabs.js";
import { bytes, count, duration, plural, rate } from "./units.js";

// `num`: slots of `slotS` seconds that are shown; `tickS`: between times at the axis.
const RANGES = {
  "15m": { history: "hour", num: 30, slotS: 30, tickS: 300 },
  "1h": { history: "hour", num: 120, slotS: 30, tickS: 900 },
  "1d": { history: "day", num: 144, slotS: 600, tickS: 21_600 },
};
const DEFAULT = "1h";

const seconds = (value) => duration(value === null ? null : 1000 * value);
const percent = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);
const MIB = 2 ** 20;

/** The smallest power of two of bytes above `most`. */
const roundBytes = (most) => 2 ** Math.ceil(Math.log2(Math.max(most, MIB)));

const FAILURES = { failed: "failed", expired: "expired", unavailable: "503", errors: "other 5xx" };
const KINDS = [
  {
    title: "Tokens per second",
    lines: { tokens_in_per_s: "prompts", tokens_out_per_s: "output" },
    show: rate,
  },
  {
    title: "Time to first token",
    lines: { ttft_p50_ms: "p50", ttft_p95_ms: "p95" },
    show: duration,
    least: 1000,
  },
  { title: "Requests per second", lines: { requests_per_s: "accepted" }, show: rate },
  {
    title: "Failures per minute",
    lines: FAILURES,
    show: rate,
  },
  { title: "Jobs", lines: { queued: "waiting", running: "running" }, show: count, least: 10 },
  { title: "Age of the queue", lines: { queue_age_s: "longest wait" }, show: seconds, least: 10 },
  { title: "KV cache", lines: { kv: "in use" }, show: percent, top: 1 },
  {
    title: "Redis memory",
    lines: { store_used: "used", store_limit: "maxmemory" },
    show: bytes,
    round: roundBytes,
  },
];

/** Failures as a rate, and a limit of memory only if there is one. */
function plotted(row, slotS) {
  const perMinute = (number) => (number === null ? null : (number * 60) / slotS);
  const rates = Object.keys(FAILURES).map((name) => [name, perMinute(row[name])]);
  return { ...row, ...Object.fromEntries(rates), store_limit: row.store_limit || null };
}

function numbersOf({ running, waiting, tokens_per_s: perS }, models) {
  const ages = (models ?? []).map(({ queue_age_s: ageS }) => ageS ?? 0);
  const longest = Math.max(0, ...ages);
  return [
    ["Tokens per second", perS === undefined ? "–" : rate(perS), ""],
    ["Running", count(running), ""],
    ["Waiting", count(waiting), longest > 0 ? `longest ${seconds(longest)}` : ""],
  ];
}

function detailsOf({ workers, queued_tokens: tokens, dead_letters: letters, redis }) {
  const details = [[plural(workers, "worker"), tabLink("workers")]];
  if (tokens !== undefined) details.push([`${plural(tokens, "prompt token")} queued`, null]);
  if (letters !== undefined) details.push([plural(letters, "dead letter"), tabLink("dead-letters")]);
  if (redis === undefined) return details;
  details.push([`Redis round trip ${duration(redis.latency_ms)}`, null]);
  if (redis.max_bytes) {
    const share = percent(redis.used_bytes / redis.max_bytes);
    details.push([`Redis memory ${bytes(redis.used_bytes)}, ${share} of maxmemory`, null]);
  }
  return details;
}

/** What an operator should look at, each with the tab that shows it. */
function concernsOf({ redis }, models, workers) {
  const concerns = [];
  if (redis?.memory === "full") concerns.push(["Redis is out of memory: requests are refused", tabLink("tenants")]);
  if (redis?.memory === "nearly_full") {
    const share = percent(redis.used_bytes / redis.max_bytes);
    concerns.push([`Redis has used ${share} of maxmemory`, tabLink("tenants")]);
  }
  for (const { model, is_served: isServed, queued, status } of models ?? []) {
    if (isServed || !queued || ["loading", "on_demand"].includes(status)) continue;
    concerns.push([`${model}: ${plural(queued, "job")} waiting and no worker`, tabLink("models")]);
  }
  for (const { id, status, model_load_error: error } of workers ?? []) {
    if (error) concerns.push([`${id} cannot load a model: ${error}`, tabLink("workers")]);
    if (status === "stalled") concerns.push([`${id} makes no progress`, tabLink("workers")]);
  }
  return concerns.slice(0, 5);
}

/** Makes a list's items anew only if they differ, so that the focus on a link stays. */
function showItems(list, items) {
  const told = JSON.stringify(items);
  if (list.dataset.told === told) return;
  list.dataset.told = told;
  list.replaceChildren(
    ...items.map(([sentence, address]) => {
      const item = element("li");
      const inside = element(address === null ? "span" : "a", "", sentence);
      if (address !== null) inside.href = address;
      item.append(inside);
      return item;
    }),
  );
  list.hidden = items.length === 0;
}

const historyTable = (body) => {
  const columns = KINDS.flatMap(({ title, lines, show }) =>
    Object.entries(lines).map(([name, label]) =>
      text(`${title}: ${label}`, (row) => show(row[name] ?? null), "number"),
    ),
  );
  return new Table(body, [text("Time", (row) => clockOf(row.at)), ...columns], (row) => row.at);
};

export function overviewTab(root) {
  const find = (id) => root.querySelector(`#${id}`);
  const [numbers, details, concerns] = [find("numbers"), find("details"), find("concerns")];
  const [history, asTable, note] = [find("history"), find("history-table"), find("history-note")];
  const curves = plots(history, KINDS);
  const table = historyTable(find("history-rows"));
  let range = RANGES[DEFAULT];
  let shown = [];

  function showNumbers(all) {
    for (const [index, [name, value, more]] of all.entries()) {
      let tile = numbers.children[index];
      if (tile === undefined) {
        tile = element("div");
        tile.append(element("dt", "", name), element("dd"), element("dd", "more"));
        numbers.append(tile);
      }
      setText(tile.children[1], value);
      setText(tile.children[2], more);
    }
  }

  function showHistory(rows, isOperator) {
    const isKnown = rows !== null && rows.length > 1 && rows[1].at - rows[0].at === range.slotS;
    history.hidden = asTable.hidden = !isKnown;
    note.hidden = isKnown || isOperator;
    if (!isKnown) return; // it arrives with the next snapshot
    shown = rows.slice(-range.num).map((row) => plotted(row, range.slotS));
    curves.show(shown, range.slotS, range.tickS);
    if (asTable.open) table.show(shown.toReversed());
  }

  asTable.addEventListener("toggle", () => {
    if (asTable.open) table.show(shown.toReversed());
  });
  return {
    open: (query) => {
      const name = Object.hasOwn(RANGES, query.get("range")) ? query.get("range") : DEFAULT;
      range = RANGES[name];
      markCurrent(find("ranges").children, tabLink("overview", { range: name }));
      return { history: range.history };
    },
    show: (state) => {
      const { service } = state;
      const [models, workers] = [rowsOf(state, "models"), rowsOf(state, "workers")];
      showNumbers(numbersOf(service, models));
      showItems(details, detailsOf(service));
      showItems(concerns, concernsOf(service, models, workers));
      showHistory(rowsOf(state, "history"), service.is_operator !== false);
    },
  };
}

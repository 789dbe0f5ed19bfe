/** A job's timeline: queued, prefill, decode; a bar for each attempt, hatched where no worker had it. */

import { element, setText } from "./element.js";
import { spansOf } from "./job_state.js";
import { picture, setAll, svg } from "./svg.js";
import { duration } from "./units.js";

const WIDTH = 1000;
const HEIGHT = 24;
const WORDS = { queued: "Queued", prefill: "Prefill", decode: "Decode", gap: "No worker" };
const HATCH_PX = 8;

/** The parts of a job's time in order, {kind, from, to} in Unix seconds; attempts have `worker`. */
function partsOf(job, now) {
  const end = job.ended_at ?? Math.max(now, job.created_at);
  const first = job.first_token_at ?? Infinity;
  const spans = spansOf(job, now);
  if (spans.length === 0 && job.started_at !== null) {
    spans.push({ from: job.started_at, to: end, worker: job.worker }); // of an older release
  }
  const parts = [{ kind: "queued", from: job.created_at, to: job.started_at ?? end }];
  let last = parts[0].to;
  for (const { from, to, worker } of spans) {
    if (from > last && parts.length > 1) parts.push({ kind: "gap", from: last, to: from });
    const decodes = Math.min(Math.max(from, first), to);
    if (decodes > from) parts.push({ kind: "prefill", from, to: decodes, worker });
    if (to > decodes) parts.push({ kind: "decode", from: decodes, to, worker });
    last = to;
  }
  if (job.recovery) parts.push({ kind: "gap", from: last, to: Math.max(last, end) });
  return parts;
}

function hatch() {
  const pattern = svg("pattern", {
    id: "hatch",
    width: HATCH_PX,
    height: HATCH_PX,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  });
  pattern.append(svg("rect", { width: HATCH_PX / 2, height: HATCH_PX }));
  const defs = svg("defs");
  defs.append(pattern);
  return defs;
}

export class Timeline {
  node = element("figure", "timeline");
  #bar = picture("way", WIDTH, HEIGHT);
  #hatch = hatch();
  #workers = element("ol", "workers");
  #legend = element("ul", "legend");

  constructor() {
    for (const name of Object.keys(WORDS)) {
      const item = element("li", name);
      item.append(element("span", "swatch"), element("span"));
      this.#legend.append(item);
    }
    setAll(this.#bar, { "aria-label": "Timeline" });
    this.node.append(this.#bar, this.#workers, this.#legend);
  }

  show(job, now) {
    const parts = partsOf(job, now);
    const begin = job.created_at;
    const length = Math.max(...parts.map(({ to }) => to)) - begin;
    const scale = WIDTH / Math.max(length, 0.001);
    const bars = parts.map(({ kind, from, to }) =>
      svg("rect", { class: kind, x: (from - begin) * scale, width: (to - from) * scale, height: HEIGHT }),
    );
    const marks = job.attempts.slice(1).map(({ started_at: at }) => `M${(at - begin) * scale} 0v${HEIGHT}`);
    this.#bar.replaceChildren(this.#hatch, ...bars, svg("path", { class: "attempts", d: marks.join("") }));
    const labels = Object.entries(WORDS).map(([kind, word], index) => {
      const own = parts.filter((part) => part.kind === kind);
      const took = own.reduce((sum, { from, to }) => sum + to - from, 0);
      const sentence = `${word} ${own.length > 0 ? duration(Math.round(1000 * took)) : "–"}`;
      setText(this.#legend.children[index].lastChild, sentence);
      const isShown = kind !== "gap" || own.length > 0;
      this.#legend.children[index].hidden = !isShown;
      return isShown ? sentence : null;
    });
    this.#workers.hidden = job.attempts.length < 2 && !job.recovery;
    this.#showWorkers(spansOf(job, now), begin, length);
    const attempts = marks.length > 0 ? `, ${job.attempt} attempts` : "";
    setAll(this.#bar, { "aria-label": `${labels.filter(Boolean).join(", ")}${attempts}` });
  }

  /** Names the worker of each attempt below its bar; the table of attempts has all of every name. */
  #showWorkers(spans, begin, length) {
    const names = spans.map(({ worker, from, to }) => {
      const name = element("li", "", worker);
      name.title = worker;
      name.style.left = `${(100 * (from - begin)) / Math.max(length, 0.001)}%`;
      name.style.width = `${(100 * (to - from)) / Math.max(length, 0.001)}%`;
      return name;
    });
    this.#workers.replaceChildren(...names);
  }
}

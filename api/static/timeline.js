/** A job's timeline as a bar: queued, prefill, decode, with a mark at each further attempt. */

import { element, setText } from "./element.js";
import { picture, setAll, svg } from "./svg.js";
import { duration } from "./units.js";

const WIDTH = 1000;
const HEIGHT = 24;
const PHASES = ["queued", "prefill", "decode"];
const WORDS = { queued: "Queued", prefill: "Prefill", decode: "Decode" };

/** {queued, prefill, decode}: [begin, end] in Unix seconds of the phases that have started. */
export function phasesOf(job, now) {
  const end = job.ended_at ?? Math.max(now, job.created_at);
  const began = [job.created_at, job.started_at, job.first_token_at];
  const phases = {};
  PHASES.forEach((name, index) => {
    if (began[index] === null) return;
    phases[name] = [began[index], Math.max(began[index], began[index + 1] ?? end)];
  });
  return phases;
}

export class Timeline {
  node = element("figure", "timeline");
  #bar = picture("way", WIDTH, HEIGHT);
  #legend = element("ul", "legend");

  constructor() {
    for (const name of PHASES) {
      this.#bar.append(svg("rect", { class: name, y: 0, height: HEIGHT }));
      const item = element("li", name);
      item.append(element("span", "swatch"), element("span"));
      this.#legend.append(item);
    }
    this.#bar.append(svg("path", { class: "attempts" }));
    setAll(this.#bar, { "aria-label": "Timeline" });
    this.node.append(this.#bar, this.#legend);
  }

  show(job, now) {
    const phases = phasesOf(job, now);
    const begin = job.created_at;
    const end = Math.max(...Object.values(phases).map(([, last]) => last));
    const scale = WIDTH / Math.max(end - begin, 0.001);
    const labels = PHASES.map((name, index) => {
      const [from, to] = phases[name] ?? [begin, begin];
      setAll(this.#bar.children[index], { x: (from - begin) * scale, width: (to - from) * scale });
      const shown = phases[name] ? duration(Math.round(1000 * (to - from))) : "–";
      const sentence = `${WORDS[name]} ${shown}`;
      setText(this.#legend.children[index].lastChild, sentence);
      return sentence;
    });
    const marks = job.attempts
      .filter(({ attempt }) => attempt > 1)
      .map(({ started_at: at }) => `M${(at - begin) * scale} 0v${HEIGHT}`);
    setAll(this.#bar.lastChild, { d: marks.join("") });
    const attempts = marks.length > 0 ? `, ${job.attempt} attempts` : "";
    setAll(this.#bar, { "aria-label": `${labels.join(", ")}${attempts}` });
  }
}

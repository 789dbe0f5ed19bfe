/** The last hour as small curves: queue, requests, time to the first token. */

import { element, setText } from "./element.js";
import { picture, setAll, svg } from "./svg.js";
import { count, duration, rate } from "./units.js";

const WIDTH = 240;
const HEIGHT = 40;
const SLOT_S = 30;
const SLOTS = 120;
const KINDS = [
  { title: "Queue depth", lines: { queued: "" }, show: count },
  { title: "Requests per second", lines: { requests_per_s: "" }, show: rate },
  {
    title: "Time to first token",
    lines: { ttft_p50_ms: "p50", ttft_p95_ms: "p95" },
    show: duration,
  },
];

/** The curve through the known values; unknown ones interrupt it. */
function curve(rows, name, end, most) {
  let isDown = false;
  const parts = [];
  for (const row of rows) {
    if (row[name] === null) {
      isDown = false;
      continue;
    }
    const x = WIDTH * (1 - (end - row.at) / (SLOT_S * (SLOTS - 1)));
    const y = HEIGHT - 2 - ((HEIGHT - 4) * row[name]) / most;
    parts.push(`${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`, isDown ? "" : "h1.5");
    isDown = true;
  }
  return parts.join("");
}

const known = (rows, name) => rows.map((row) => row[name]).filter((value) => value !== null);

class Sparkline {
  node = element("figure", "spark");
  #kind;
  #value = element("strong");
  #most = element("span", "most");
  #picture = picture("curve", WIDTH, HEIGHT);

  constructor(kind) {
    this.#kind = kind;
    const caption = element("figcaption");
    caption.append(element("span", "", kind.title), this.#value, this.#most);
    this.#picture.append(
      ...Object.keys(kind.lines).map((_, index) => svg("path", { class: `line${index}` })),
    );
    setAll(this.#picture, { "aria-label": kind.title });
    this.node.append(caption, this.#picture);
  }

  show(rows) {
    const { title, lines, show } = this.#kind;
    const names = Object.keys(lines);
    const most = Math.max(0, ...names.flatMap((name) => known(rows, name)));
    const end = rows.at(-1)?.at ?? 0;
    const labels = names.map((name, index) => {
      setAll(this.#picture.children[index], { d: curve(rows, name, end, most || 1) });
      return `${lines[name]} ${show(known(rows, name).at(-1) ?? null)}`.trim();
    });
    setText(this.#value, labels.join(" · "));
    setText(this.#most, most > 0 ? `max ${show(most)}` : "");
    const label = `${title} in the last hour: now ${labels.join(", ")}; max ${show(most)}`;
    setAll(this.#picture, { "aria-label": label });
  }
}

/** Curves in `root`. */
export function sparklines(root) {
  const curves = KINDS.map((kind) => new Sparkline(kind));
  root.append(...curves.map(({ node }) => node));
  return {
    show: (rows) => {
      for (const one of curves) one.show(rows);
    },
  };
}

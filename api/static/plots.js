/**
 * Plots of the history: lines over time with axes, a legend with the latest values, and a cursor that
 * the pointer and the arrow keys move. An unknown value interrupts a line.
 */

import { element, setText } from "./element.js";
import { picture, setAll, svg } from "./svg.js";

const WIDTH = 1000;
const HEIGHT = 100;
const EDGE = 0.1; // of the width: a time nearer to the end of the axis would be cut
const CLOCK = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  hourCycle: "h23",
});
const PRECISE = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

/** The clock's time of Unix seconds. */
export const clockOf = (seconds) => PRECISE.format(new Date(1000 * seconds));

/** The smallest 1, 2 or 5 times a power of ten that is not below `value`. */
function roundTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * (1 - 1e-9));
}

/** The Unix seconds inside the window that are a multiple of `stepS` on the reader's clock. */
function ticksOf(beginS, endS, stepS) {
  const offsetS = -60 * new Date(1000 * endS).getTimezoneOffset();
  const edgeS = EDGE * (endS - beginS);
  const ticks = [];
  for (let at = Math.ceil((beginS + offsetS) / stepS) * stepS - offsetS; at < endS - edgeS; at += stepS) {
    if (at > beginS + edgeS) ticks.push(at);
  }
  return ticks;
}

class Plot {
  node = element("figure", "plot");
  #kind;
  #lines;
  #values = [];
  #picture = picture("curve", WIDTH, HEIGHT);
  #area = element("div", "area");
  #marker = element("div", "marker");
  #tops = [element("span"), element("span"), element("span", "", "0")];
  #ticks = element("div", "ticks");
  #readout = element("p", "readout");
  #rows = [];
  #window = null;
  #at = null; // the index of the row under the cursor; null: the latest

  /**
   * `kind`: {title, lines: {name: label}, show}, and of the axis' top: `top`, always this; `round(most)`
   * instead of 1, 2 or 5 times a power of ten; `least` if all values are 0.
   */
  constructor(kind) {
    this.#kind = kind;
    this.#lines = Object.entries(kind.lines);
    const legend = element("ul", "legend");
    for (const [index, [, label]] of this.#lines.entries()) {
      this.#picture.append(svg("path", { class: `line${index}` }));
      const item = element("li");
      const value = element("strong");
      item.append(element("span", `stroke line${index}`), element("span", "", label), value);
      this.#values.push(value);
      legend.append(item);
    }
    const axis = element("div", "axis");
    axis.append(...this.#tops);
    this.#marker.hidden = true;
    setAll(this.#picture, { role: "presentation" });
    this.#area.append(this.#picture, this.#marker);
    setAll(this.#area, { tabindex: 0, role: "slider", "aria-label": kind.title, "aria-valuemin": 0 });
    const caption = element("figcaption");
    caption.append(element("h3", "", kind.title), this.#readout);
    this.node.append(caption, axis, this.#area, this.#ticks, legend);
    this.#listen();
  }

  #listen() {
    this.#area.addEventListener("pointermove", (event) => {
      const { left, width } = this.#area.getBoundingClientRect();
      this.#point(Math.round(((event.clientX - left) / width) * this.#rows.length - 0.5));
    });
    for (const event of ["pointerleave", "blur"]) {
      this.#area.addEventListener(event, () => this.#point(null));
    }
    this.#area.addEventListener("keydown", (event) => {
      const last = this.#rows.length - 1;
      const at = this.#at ?? last;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.#point(to);
    });
  }

  /** `rows` of the window, each of `slotS` seconds. */
  show(rows, slotS, tickS) {
    this.#rows = rows;
    const endS = (rows.at(-1)?.at ?? 0) + slotS;
    const beginS = endS - slotS * rows.length;
    this.#window = { beginS, spanS: endS - beginS, slotS };
    const top = this.#topOf(rows);
    for (const [index, [name]] of this.#lines.entries()) {
      setAll(this.#picture.children[index], { d: this.#curve(name, top) });
    }
    const [highest, half] = [top, top / 2].map((one) => this.#kind.show(one));
    setText(this.#tops[0], highest);
    setText(this.#tops[1], half === highest ? "" : half); // half a job is shown as one
    this.#showTicks(ticksOf(beginS, endS, tickS));
    this.#point(this.#at);
  }

  #topOf(rows) {
    if (this.#kind.top !== undefined) return this.#kind.top;
    const values = this.#lines.flatMap(([name]) => rows.map((row) => row[name] ?? 0));
    const most = Math.max(0, ...values);
    if (this.#kind.round !== undefined) return this.#kind.round(most);
    return most > 0 ? roundTop(most) : (this.#kind.least ?? 1);
  }

  #curve(name, top) {
    const step = WIDTH / this.#rows.length;
    let isDown = false;
    const parts = [];
    for (const [index, row] of this.#rows.entries()) {
      const value = row[name] ?? null;
      if (value === null) {
        isDown = false;
        continue;
      }
      const x = step * (index + 0.5);
      const y = HEIGHT * (1 - Math.min(value / top, 1));
      parts.push(`${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`, isDown ? "" : "h0.1");
      isDown = true;
    }
    return parts.join("");
  }

  #showTicks(ticks) {
    while (this.#ticks.children.length > ticks.length) this.#ticks.lastChild.remove();
    for (const [index, at] of ticks.entries()) {
      let tick = this.#ticks.children[index];
      if (tick === undefined) {
        tick = element("span");
        this.#ticks.append(tick);
      }
      setText(tick, CLOCK.format(new Date(1000 * at)));
      const { beginS, spanS } = this.#window;
      tick.style.left = `${((100 * (at - beginS)) / spanS).toFixed(2)}%`;
    }
  }

  /** The value under the cursor; without a cursor the latest that is known. */
  #valueOf(name, row) {
    if (this.#at !== null) return row[name] ?? null;
    return this.#rows.findLast((one) => (one[name] ?? null) !== null)?.[name] ?? null;
  }

  /** Moves the cursor to a row; null: it goes, and the values are the latest. */
  #point(index) {
    const last = this.#rows.length - 1;
    this.#at = index === null ? null : Math.max(0, Math.min(index, last));
    const row = this.#rows[this.#at ?? last];
    if (row === undefined) return;
    this.#marker.hidden = this.#at === null;
    this.#marker.style.left = `${(100 * ((this.#at ?? last) + 0.5)) / this.#rows.length}%`;
    const values = this.#lines.map(([name]) => this.#kind.show(this.#valueOf(name, row)));
    for (const [number, value] of values.entries()) setText(this.#values[number], value);
    const time = this.#at === null ? "latest" : clockOf(row.at);
    setText(this.#readout, time);
    const told = this.#lines.map(([, label], number) => `${label} ${values[number]}`);
    setAll(this.#area, {
      "aria-valuemax": last,
      "aria-valuenow": this.#at ?? last,
      "aria-valuetext": `${time}: ${told.join(", ")}`,
    });
  }
}

/** Plots of `kinds` in `root`. */
export function plots(root, kinds) {
  const all = kinds.map((kind) => new Plot(kind));
  root.append(...all.map(({ node }) => node));
  return {
    show: (rows, slotS, tickS) => {
      for (const one of all) one.show(rows, slotS, tickS);
    },
  };
}

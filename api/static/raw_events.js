/** The last events of an answer as they came, folded; text is made of them only while they show. */

import { element } from "./element.js";

const MAX_EVENTS = 200;
const MAX_EVENT_CHARS = 2000;

export class RawEvents {
  node = element("details", "events");
  #summary = element("summary");
  #text = element("pre");
  #events = [];
  #numEvents = 0;

  constructor() {
    this.#text.tabIndex = 0;
    this.node.append(this.#summary, this.#text);
    this.node.hidden = true;
    this.node.addEventListener("toggle", () => this.show());
  }

  add(event) {
    const text = JSON.stringify(event);
    const isLong = text.length > MAX_EVENT_CHARS;
    this.#events.push(isLong ? `${text.slice(0, MAX_EVENT_CHARS)}…` : text);
    if (this.#events.length > MAX_EVENTS) this.#events.shift();
    this.#numEvents += 1;
  }

  show() {
    const isCut = this.#numEvents > this.#events.length;
    const count = isCut ? `last ${MAX_EVENTS} of ${this.#numEvents}` : this.#numEvents;
    this.node.hidden = this.#numEvents === 0;
    this.#summary.textContent = `Events (${count})`;
    if (this.node.open) this.#text.textContent = this.#events.join("\n");
  }
}

/**
 * Renders parts of a text with a library that is loaded for the first one. A part shows its source
 * until then, and where the library fails.
 */

import { keepMarks } from "./resumed_mark.js";
import { keepEnd } from "./scroll.js";

const SLICE_MS = 15; // of work at a time
const MAX_MS = 300; // a part that takes longer is the last one: no harmless one does
const MAX_CACHED = 200; // parts

const nextTask = () => new Promise((resolve) => setTimeout(resolve));

export class Renderer {
  #load;
  #cache = new Map();
  #queue = []; // {node, key, make}
  #isRunning = false;
  #isCostly = false;

  /** `load()` resolves with the library. */
  constructor(load) {
    this.#load = load;
  }

  /**
   * Fills `node` with `make(library)`, at once where `key` was rendered before: a text that grows is
   * rendered often. `make` returns null where the source is to stay.
   */
  render(node, key, make) {
    const made = this.#cache.get(key);
    if (made) node.replaceChildren(made.cloneNode(true));
    else if (!this.#isCostly) this.#queue.push({ node, key, make });
    if (!this.#isRunning && this.#queue.length > 0) void this.#run();
  }

  async #run() {
    this.#isRunning = true;
    await nextTask(); // the nodes are on the page then
    const library = await this.#load().catch(() => null);
    if (library === null) this.#queue = []; // not fetched: the sources stay, the next part tries again
    while (this.#queue.length > 0) {
      this.#show(this.#slice(library));
      await nextTask();
    }
    this.#isRunning = false;
  }

  /** Renders for a while. Returns [node, content] of the parts that are still on the page. */
  #slice(library) {
    const endMs = performance.now() + SLICE_MS;
    const rendered = [];
    while (this.#queue.length > 0 && performance.now() < endMs) {
      const { node, key, make } = this.#queue.shift();
      if (!node.isConnected) continue;
      const content = this.#cache.get(key)?.cloneNode(true) ?? this.#made(key, () => make(library));
      if (content !== null) rendered.push([node, content]);
    }
    return rendered;
  }

  #made(key, make) {
    const beganMs = performance.now();
    const content = make();
    if (performance.now() - beganMs > MAX_MS) {
      this.#isCostly = true;
      this.#queue = [];
    }
    if (content === null) return null;
    if (this.#cache.size === MAX_CACHED) this.#cache.delete(this.#cache.keys().next().value);
    this.#cache.set(key, content);
    return content.cloneNode(true);
  }

  #show(rendered) {
    if (rendered.length === 0) return;
    const change = () => {
      for (const [node, content] of rendered) keepMarks(node, () => node.replaceChildren(content));
    };
    const log = rendered[0][0].closest("[role=log]");
    if (log) keepEnd(log, change);
    else change();
  }
}

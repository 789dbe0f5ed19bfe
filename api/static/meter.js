/** Times one answer under way: time to first token and tokens per second, seen from this page. */

import { duration, plural, rate } from "./units.js";

export class Meter {
  #startMs = performance.now();
  #firstMs = null;
  #lastMs = null;
  #numBefore = null; // tokens that were there at the first one seen
  #numTokens = 0;
  #hasBegin;
  #isPaused = false;
  #pausedMs = 0;

  /** `hasBegin`: the answer starts now; else it resumes, and its first token's time is unknown. */
  constructor(hasBegin) {
    this.#hasBegin = hasBegin;
  }

  get isNew() {
    return this.#firstMs === null;
  }

  /** No worker computes until the next tokens arrive: that time has no rate. */
  pause() {
    this.#isPaused = true;
  }

  /** Tokens arrived: `numTokens` are there now. */
  tick(numTokens) {
    const nowMs = performance.now();
    if (this.#isPaused && !this.isNew) this.#pausedMs += nowMs - this.#lastMs;
    this.#isPaused = false;
    this.#lastMs = nowMs;
    this.#firstMs ??= this.#lastMs;
    this.#numBefore ??= numTokens;
    this.#numTokens = numTokens;
  }

  /** {ttftMs, perSecond}, null if unknown. */
  get timing() {
    const elapsedMs = this.#lastMs - this.#firstMs - this.#pausedMs;
    const arrived = this.#numTokens - this.#numBefore;
    return {
      ttftMs: this.#hasBegin && !this.isNew ? this.#firstMs - this.#startMs : null,
      // Those that a reader catches up with come all at once: there is no pace to be seen.
      perSecond: this.#hasBegin && elapsedMs > 0 ? (arrived * 1000) / elapsedMs : null,
    };
  }

  toString() {
    if (this.isNew) return this.#hasBegin ? "waiting for the first token" : "";
    const { ttftMs, perSecond } = this.timing;
    const facts = [plural(this.#numTokens, "token")];
    if (ttftMs !== null) facts.unshift(`first token ${duration(ttftMs)}`);
    if (perSecond !== null) facts.push(`${rate(perSecond)} tokens/s`);
    return facts.join(" · ");
  }
}

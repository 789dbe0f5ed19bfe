/** Times one answer: time to first token and tokens per second, seen from this page. */

import { duration, plural, rate } from "./units.js";

export class Meter {
  #startMs = performance.now();
  #firstMs = null;
  #lastMs = null;
  #numPieces = 0;
  #numTokens = null;

  /** A piece of text arrived. A piece is a token most of the time; the usage corrects it. */
  tick() {
    this.#lastMs = performance.now();
    this.#firstMs ??= this.#lastMs;
    this.#numPieces += 1;
  }

  /** The exact number of tokens, from the service. */
  set numTokens(numTokens) {
    this.#numTokens = numTokens;
  }

  get ttftMs() {
    return this.#firstMs === null ? null : this.#firstMs - this.#startMs;
  }

  /** Tokens after the first per second between the first and the last piece; NaN before. */
  get tokensPerSecond() {
    const numTokens = this.#numTokens ?? this.#numPieces;
    const elapsedMs = this.#lastMs - this.#firstMs;
    return numTokens > 1 && elapsedMs > 0 ? ((numTokens - 1) * 1000) / elapsedMs : NaN;
  }

  toString() {
    if (this.#firstMs === null) return "waiting for the first token";
    const tokens = plural(this.#numTokens ?? this.#numPieces, "token");
    const facts = [`first token ${duration(this.ttftMs)}`, tokens];
    if (!Number.isNaN(this.tokensPerSecond)) facts.push(`${rate(this.tokensPerSecond)} tokens/s`);
    return facts.join(" · ");
  }
}

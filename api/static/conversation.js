/** The conversation: what stands on the page, and what of it the model is told next time. */

import { Turn } from "./turn.js";

const NEAR_END_PX = 60;

export class Conversation {
  #log;
  #welcome;
  #history = []; // {role, content} of the turns that were answered

  constructor(log, welcome) {
    this.#log = log;
    this.#welcome = welcome;
  }

  get isEmpty() {
    return this.#log.childElementCount === 0;
  }

  /** Shows a question and an empty answer; returns that turn and the messages to send. */
  begin(question) {
    this.#welcome.hidden = true;
    this.#log.hidden = false;
    const turn = new Turn("assistant");
    this.#log.append(new Turn("user", question).node, turn.node);
    this.#log.scrollTop = this.#log.scrollHeight;
    return { turn, messages: [...this.#history, { role: "user", content: question }] };
  }

  /** From now on the model is told of this question and what came of the answer, if anything. */
  keep(messages, turn) {
    if (turn.text !== "") this.#history = [...messages, { role: "assistant", content: turn.text }];
  }

  /** Makes a change and keeps the newest line in sight, unless the reader has scrolled away. */
  follow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) {
      this.#log.scrollTop = this.#log.scrollHeight;
    }
  }

  clear() {
    this.#history = [];
    this.#log.replaceChildren();
    this.#log.hidden = true;
    this.#welcome.hidden = false;
  }
}

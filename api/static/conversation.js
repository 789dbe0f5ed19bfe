/** The turns of a chat on the page, in a log that stays at its end while the reader is there. */

import { AnswerTurn } from "./answer_turn.js";
import { keepEnd } from "./scroll.js";
import { UserTurn } from "./turn.js";

export class Conversation {
  #log;
  #welcome;
  #views = [];

  constructor(log, welcome) {
    this.#log = log;
    this.#welcome = welcome;
  }

  /**
   * Shows a chat's turns. `actions` has `edit(index, text)`, `regenerate(index)`, `results(index)`,
   * `share(answer)` and `showJob(answer)`.
   */
  show(turns, actions) {
    this.#views = [];
    this.#log.replaceChildren();
    this.#log.hidden = turns.length === 0;
    this.#welcome.hidden = turns.length > 0;
    this.add(turns, actions);
  }

  /** Shows the turns that are not shown yet. */
  add(turns, actions) {
    this.#log.hidden = turns.length === 0;
    this.#welcome.hidden = turns.length > 0;
    for (let index = this.#views.length; index < turns.length; index += 1) {
      const view = this.#view(turns[index], index, actions);
      this.#views.push(view);
      this.#log.append(view.node);
    }
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #view({ role, text, answer }, index, actions) {
    if (role === "user") return new UserTurn(text, (edited) => actions.edit(index, edited));
    const ofAnswer = {
      regenerate: () => actions.regenerate(index),
      results: () => actions.results(index),
      share: () => actions.share(answer),
      showJob: () => actions.showJob(answer),
    };
    return new AnswerTurn(answer, ofAnswer, (change) => this.follow(change));
  }

  /** The view of a turn. */
  at(index) {
    return this.#views.at(index);
  }

  /** Makes a change and keeps the newest line in sight, unless the reader has scrolled away. */
  follow(change) {
    keepEnd(this.#log, change);
  }
}

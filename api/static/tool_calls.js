/** The calls of an answer, with a field for each result. */

import { element } from "./element.js";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut off, or still coming
  }
}

export class ToolCalls {
  node = element("div", "calls");
  #calls;
  #shown = []; // {text} of each call
  #form = element("form");

  /** `onResults()`: the results stand in the calls and are to be sent. */
  constructor(calls, onResults) {
    this.#calls = calls;
    this.node.append(this.#form);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults();
    });
  }

  show() {
    this.node.hidden = this.#calls.length === 0;
    for (const call of this.#calls.slice(this.#shown.length)) {
      const node = element("section", "call");
      const text = element("pre");
      text.tabIndex = 0;
      node.append(element("h4", "", `Call of ${call.name}`), text);
      this.#form.append(node);
      this.#shown.push({ node, text });
    }
    this.#calls.forEach((call, index) => {
      this.#shown[index].text.textContent = pretty(call.arguments);
    });
  }

  /** Asks for the results of the calls, once they are complete. */
  askForResults() {
    if (this.#calls.length === 0) return;
    this.#calls.forEach((call, index) => {
      const field = element("textarea");
      field.rows = 2;
      field.value = call.result;
      const label = element("label", "", `Result of ${call.name}`);
      label.append(field);
      field.addEventListener("input", () => (call.result = field.value));
      this.#shown[index].node.append(label);
    });
    const send = element("button", "", "Send the results");
    this.#form.append(send);
  }
}

/** Questions for an empty chat: those of the chosen model, else some that any model can answer. */

import { element } from "./element.js";

const DEMO_MODEL = "penstock-demo";
const FOR_ANY_MODEL = [
  "Explain how a dam turns water into electricity.",
  "Write a short poem about a river.",
  "What is the difference between a thread and a process?",
  "Suggest a dinner for four with rice and beans.",
];

/**
 * Shows the questions of a model, as `/v1/models` describes it, as buttons in `list`; of the demo
 * also how to start a real model.
 */
export function showSuggestions(list, { id, suggestions = [] }) {
  document.getElementById("demo-hint").hidden = id !== DEMO_MODEL;
  const questions = suggestions.length > 0 ? suggestions : FOR_ANY_MODEL;
  const shown = [...list.querySelectorAll("button")].map(({ textContent }) => textContent);
  if (shown.join("\n") === questions.join("\n")) return; // a button keeps its focus
  list.replaceChildren(
    ...questions.map((question) => {
      const button = element("button", "", question);
      button.type = "button";
      const item = element("li");
      item.append(button);
      return item;
    }),
  );
}

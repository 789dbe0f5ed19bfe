/** Small dialogs: a text to change, a question, something to read. Escape leaves them. */

import { copyButton } from "./clipboard.js";
import { element } from "./element.js";

/** Opens a dialog with these nodes; resolves with the value of the button that closed it. */
function show(title, nodes, buttons) {
  const dialog = element("dialog", "small");
  const form = element("form");
  form.method = "dialog";
  const row = element("div", "buttons");
  for (const [value, text, className] of buttons) {
    const button = element("button", className, text);
    button.value = value;
    row.append(button);
  }
  const heading = element("h2", "", title);
  heading.id = "dialog-title";
  dialog.setAttribute("aria-labelledby", heading.id);
  form.append(heading, ...nodes, row);
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

/** Asks for a text; null when it was not given. */
export async function askText(title, text) {
  const field = element("input");
  field.value = text;
  field.required = true;
  field.maxLength = 200;
  field.setAttribute("aria-label", title);
  // The first button is what Enter presses.
  const buttons = [["yes", "Save", "primary"], ["", "Cancel", ""]];
  const answered = show(title, [field], buttons);
  field.select();
  return (await answered) === "yes" && field.value.trim() !== "" ? field.value.trim() : null;
}

export async function confirmed(title, text, verb) {
  const buttons = [["yes", verb, "danger"], ["", "Back", ""]];
  return (await show(title, [element("p", "", text)], buttons)) === "yes";
}

/** Shows a text to read and copy. */
export function showText(title, explanation, text) {
  const shown = element("pre", "", text);
  shown.tabIndex = 0;
  const nodes = [element("p", "", explanation), shown, copyButton(`Copy: ${title}`, () => text)];
  return show(title, nodes, [["", "Close", "primary"]]);
}

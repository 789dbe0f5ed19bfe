/** A question on the page. All text goes in as text, never as markup. */

import { copyButton } from "./clipboard.js";
import { element } from "./element.js";
import { icon } from "./icons.js";

/** A quiet button. `iconName`: of the icon before its text, or null. */
export function action(iconName, text, label, run) {
  const button = element("button", "quiet", text);
  if (iconName !== null) button.prepend(icon(iconName));
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", run);
  return button;
}

/** A question; it can be written anew, which `onEdit(text)` takes. */
export class UserTurn {
  node = element("article", "turn user");
  #body;
  #actions = element("div", "actions");

  constructor(text, onEdit) {
    this.#body = element("div", "text", text);
    this.#actions.append(
      copyButton("Copy the question", () => text),
      action("edit", "Edit", "Edit the question", () => this.#edit(text, onEdit)),
    );
    this.node.append(element("h3", "who", "You"), this.#body, this.#actions);
  }

  #edit(text, onEdit) {
    const form = element("form", "edit");
    const area = element("textarea");
    area.value = text;
    area.rows = Math.min(text.split("\n").length + 1, 12);
    area.setAttribute("aria-label", "Edit the question; the turns after it are replaced");
    const close = () => {
      form.replaceWith(this.#body, this.#actions);
      this.#actions.lastChild.focus();
    };
    const send = element("button", "primary", "Send again");
    form.append(area, send, action(null, "Cancel", "Leave the question as it was", close));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() !== "" && onEdit(area.value) === false) area.focus();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    this.#body.replaceWith(form);
    this.#actions.remove();
    area.focus();
  }
}

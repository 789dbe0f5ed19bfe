/** Copies text. The clipboard's own interface is missing where the page did not come over HTTPS. */

import { element } from "./element.js";
import { icon } from "./icons.js";

const SHOWN_MS = 1500;

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return true;
  }
  const area = element("textarea", "hidden");
  area.value = text;
  const focused = document.activeElement;
  (focused?.closest("dialog") ?? document.body).append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

/** A button that copies the result of `text()`, and confirms it. */
export function copyButton(label, text) {
  const button = element("button", "quiet");
  const state = (name, word) => button.replaceChildren(icon(name), word);
  state("copy", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    const isCopied = await copy(text()).catch(() => false);
    if (isCopied) state("done", "Copied");
    else state("copy", "Not copied");
    setTimeout(() => state("copy", "Copy"), SHOWN_MS);
  });
  return button;
}

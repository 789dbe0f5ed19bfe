/** The API key, if the service requires one. It lives only in this tab's session. */

import { element } from "./element.js";
import { tabStore } from "./storage.js";

const NAME = "penstock-key";

let form = null;
let waiting = []; // called when a key was given

export function keyHeaders() {
  const key = tabStore.get(NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Shows the form once, however often it is called; refused requests are retried with the key. */
export function askForKey() {
  if (form !== null) return;
  const input = element("input");
  Object.assign(input, { type: "password", required: true, pattern: "[!-~]+", autocomplete: "off" });
  const label = element("label", "", "API key ");
  label.append(input);
  form = element("form", "key");
  form.append(label, element("button", "primary", "Use this key"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    tabStore.set(NAME, input.value);
    form.remove();
    form = null;
    for (const resolve of waiting) resolve();
    waiting = [];
  });
  document.querySelector("main").prepend(form);
}

/** Resolves when a key was given. */
export const keyGiven = () => new Promise((resolve) => waiting.push(resolve));

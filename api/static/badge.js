/** A state as one coloured word. `kind`: good, busy, idle, warn or bad. */

import { element, setText } from "./element.js";

export const newBadge = () => element("span");

export function setBadge(badge, word, kind) {
  setText(badge, word);
  badge.className = `badge ${kind}`;
}

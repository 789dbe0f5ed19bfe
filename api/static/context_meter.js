/** How much of the model's context the chat has used. */

import { setText } from "./element.js";
import { count } from "./units.js";

const NEARLY = 0.85; // of the context, from which it warns

/**
 * Shows what the last answer of `turns` used, prompt and output. `place` has a meter and a text; it
 * is hidden while this or `maxTokens`, the model's limit, is not known.
 */
export function showContext(place, turns, maxTokens) {
  const last = turns.findLast(({ answer }) => answer?.numPrompt != null)?.answer;
  place.hidden = !last || maxTokens === null;
  if (place.hidden) return;
  const numTokens = last.numPrompt + last.numTokens;
  const [bar, text] = place.children;
  const isNearlyFull = numTokens >= NEARLY * maxTokens;
  bar.max = maxTokens;
  bar.high = NEARLY * maxTokens;
  bar.optimum = 0;
  bar.value = numTokens;
  place.classList.toggle("full", isNearlyFull);
  const note = isNearlyFull ? ": nearly full" : "";
  setText(text, `${count(numTokens)} of ${count(maxTokens)} tokens${note}`);
  place.title = isNearlyFull
    ? "The chat fills the model's context: a new chat has room again."
    : "What the last answer used of the model's context.";
}

/** The items of a request that hold a chat's history, without its reasoning. */

import { hasOutput } from "./answer.js";

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function itemsOfAnswer({ text, calls }) {
  const items = text === "" ? [] : [{ role: "assistant", content: text }];
  const whole = calls.filter((call) => isJson(call.arguments)); // the token limit cuts some
  for (const { id, name, arguments: args } of whole) {
    items.push({ type: "function_call", call_id: id, name, arguments: args });
  }
  for (const { id, result } of whole) {
    items.push({ type: "function_call_output", call_id: id, output: result });
  }
  return items;
}

/** Returns the items of turns. A question that was never answered is left out, but for the last. */
export function itemsOf(turns) {
  const items = [];
  let questions = [];
  for (const { role, text, answer } of turns) {
    if (role === "user") {
      questions = [{ role, content: text }];
    } else if (hasOutput(answer)) {
      items.push(...questions, ...itemsOfAnswer(answer));
      questions = [];
    }
  }
  return [...items, ...questions];
}

/**
 * One answer as plain data, which survives a reload: the part received so far, and the number of the
 * last event, after which it resumes.
 *
 * `status`: `sending` until the service has confirmed it; `queued`, `running`; then one of OVER.
 * `refused`: no job was created. `lost`: the service no longer has it.
 */

import { sentence } from "./service.js";

const OVER = new Set(["completed", "incomplete", "cancelled", "failed", "refused", "lost"]);

/** 128 random bits; `randomUUID` is missing where the page did not come over HTTPS. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An answer to `body` that is still to be sent. */
export const newAnswer = (body) => ({
  status: "sending",
  key: newId(),
  body, // until the service has confirmed it
  id: null,
  model: body.model,
  last: -1, // number of the last event
  reasoning: "",
  numReasoning: 0, // tokens
  text: "",
  numTokens: 0, // of reasoning, text and calls
  numPrompt: null, // tokens of the question and all before it, once it is over
  calls: [], // {item, id, name, arguments, result}
  isCut: false, // by the token limit
  error: null,
  code: null,
  timing: null, // {ttftMs, perSecond}
  loss: null, // {cause, tokens} while no worker has its job
  rescues: [], // {cause, tokens, worker, afterS, at}; `at`: characters of the text then, or null
});

/** The answer of a response that exists. */
export const answerOf = (id) => ({
  ...newAnswer({ model: null }),
  status: "queued",
  body: null,
  id,
});

/** The answer that is a job's text; `last` is the id of the last event. */
export const answerOfJob = (job) => ({
  ...newAnswer({ model: job.model }),
  status: "queued",
  body: null,
  id: job.id,
  isJob: true,
  last: null,
  texts: [], // of the choices
});

export const isOver = (answer) => OVER.has(answer.status);

/** Whether there is output to send back to the model as history. */
export const hasOutput = (answer) => answer.text !== "" || answer.calls.length > 0;

function addItem(answer, item) {
  if (item.type === "message" && answer.text !== "") answer.text += "\n\n";
  if (item.type !== "function_call") return;
  const { id, call_id, name } = item;
  answer.calls.push({ item: id, id: call_id, name, arguments: "", result: "" });
}

function end(answer, response) {
  answer.status = response.status;
  answer.isCut = response.incomplete_details?.reason === "max_output_tokens";
  if (response.usage) {
    answer.numPrompt = response.usage.input_tokens;
    answer.numTokens = response.usage.output_tokens;
    answer.numReasoning = response.usage.output_tokens_details.reasoning_tokens;
  }
  if (response.error) {
    answer.error = sentence(response.error.message);
    answer.code = response.error.type ?? response.error.code;
  }
}

/** Adds a text of a job, which may have several choices. */
function addChoice(answer, { index, delta, num_tokens: numTokens }) {
  while (answer.texts.length <= index) answer.texts.push("");
  answer.texts[index] += delta;
  answer.numTokens += numTokens;
  const titled = (text, number) => `**Choice ${number + 1}**\n\n${text}`;
  answer.text = answer.texts.length > 1 ? answer.texts.map(titled).join("\n\n") : answer.texts[0];
}

function endJob(answer, event) {
  answer.status = event.status;
  answer.isCut = event.is_cut;
  answer.numTokens = event.num_tokens;
  answer.error = event.message;
}

function resumed(answer, { worker = null, after_s: afterS = null, tokens }) {
  const at = (answer.texts?.length ?? 1) > 1 ? null : answer.text.length;
  const loss = answer.loss ?? { cause: null, tokens };
  answer.rescues = [...(answer.rescues ?? []), { ...loss, worker, afterS, at }];
  answer.loss = null;
}

function recover(answer, event) {
  if (event.state === "resumed") resumed(answer, event);
  else answer.loss = { cause: event.cause, tokens: event.tokens };
}

/** Adds an event. A delta is one token's text most of the time; the end corrects the counts. */
export function applyEvent(answer, event) {
  if (event.type === "recovery") {
    recover(answer, event);
    return;
  }
  if (answer.loss && event.type.endsWith(".delta")) resumed(answer, answer.loss);
  switch (event.type) {
    case "response.created":
      answer.model = event.response.model;
      break;
    case "response.queued":
      answer.status = "queued";
      break;
    case "response.in_progress":
      answer.status = "running";
      break;
    case "response.output_item.added":
      addItem(answer, event.item);
      break;
    case "response.reasoning_text.delta":
      answer.reasoning += event.delta;
      answer.numReasoning += 1;
      answer.numTokens += 1;
      break;
    case "response.output_text.delta":
      answer.text += event.delta;
      answer.numTokens += 1;
      break;
    case "response.function_call_arguments.delta":
      answer.calls.find(({ item }) => item === event.item_id).arguments += event.delta;
      answer.numTokens += 1;
      break;
    case "job.found":
      answer.model = event.model;
      answer.status = event.status;
      break;
    case "job.delta":
      addChoice(answer, event);
      break;
    case "job.ended":
      endJob(answer, event);
      break;
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      end(answer, event.response);
      break;
  }
  answer.last = event.sequence_number;
}

/** Ends an answer that the service does not have, or no longer has. */
export function abandon(answer, message, code = null) {
  answer.status = answer.id === null ? "refused" : "lost";
  answer.body = null;
  answer.error = message;
  answer.code = code;
}

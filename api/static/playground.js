/** The playground: one conversation with the served model, kept in this page's memory alone. */

import { Conversation } from "./conversation.js";
import { Meter } from "./meter.js";
import { ServiceError, getJob, listModels, streamChat } from "./service.js";
import { plural } from "./units.js";

const MODELS_RETRY_MS = 2000;
const CANCEL_LOOKS = 20;
const CANCEL_LOOK_MS = 100;
const ENDED = new Set(["finished", "failed", "cancelled", "expired"]);
const SETTINGS = { temperature: "temperature", "max-tokens": "max_tokens", seed: "seed" };

const byId = (id) => document.getElementById(id);
const page = {
  form: byId("composer"),
  message: byId("message"),
  send: byId("send"),
  stop: byId("stop"),
  clear: byId("clear"),
  model: byId("model"),
  status: byId("status"),
};
const conversation = new Conversation(byId("conversation"), byId("welcome"));

let running = null; // the AbortController of the answer under way

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const say = (text) => (page.status.textContent = text);

function setControls() {
  page.send.hidden = running !== null;
  page.stop.hidden = running === null;
  page.send.disabled = page.model.options.length === 0;
  page.clear.disabled = running !== null || conversation.isEmpty;
}

/** The request's settings; an empty field leaves the choice to the service. */
function settings() {
  const chosen = { model: page.model.value };
  for (const [id, name] of Object.entries(SETTINGS)) {
    const { value } = byId(id);
    if (value !== "") chosen[name] = Number(value);
  }
  return chosen;
}

async function loadModels() {
  for (;;) {
    try {
      const models = await listModels();
      if (models.length > 0) {
        page.model.replaceChildren(...models.map(({ id }) => new Option(id, id)));
        page.model.disabled = models.length < 2;
        const name = models.length === 1 ? models[0].id : `${models.length} models`;
        const isServed = models.some((model) => model.is_served);
        say(isServed ? `Ready: ${name}.` : "No worker is alive. Questions wait until one comes.");
        setControls();
        return;
      }
      say("No worker serves a model yet. Waiting for one…");
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      say(`${error.message} Trying again…`);
    }
    await pause(MODELS_RETRY_MS);
  }
}

/** Receives one answer into `turn`; returns its finish reason, null when there was none. */
async function receive(messages, turn, meter, signal) {
  let finishReason = null;
  const chunks = streamChat({ ...settings(), messages }, signal, (jobId) => (turn.job = jobId));
  for await (const { choices, usage } of chunks) {
    const choice = choices?.[0];
    finishReason = choice?.finish_reason ?? finishReason;
    if (usage) meter.numTokens = usage.completion_tokens;
    if (choice?.delta?.content) {
      if (meter.ttftMs === null) say("Answering…");
      meter.tick();
      conversation.follow(() => turn.append(choice.delta.content));
    }
    turn.facts = meter;
  }
  return finishReason;
}

/** After a stop: what the service says of the job, which ends by itself within a moment. */
async function sayCancelled(jobId) {
  say("Stopping…");
  try {
    for (let look = 0; jobId && look < CANCEL_LOOKS; look += 1) {
      const job = await getJob(jobId);
      if (ENDED.has(job.status)) {
        const tokens = plural(job.usage.completion_tokens, "token");
        say(`Stopped: the job is ${job.status} after ${tokens}.`);
        return;
      }
      await pause(CANCEL_LOOK_MS);
    }
    say("Stopped.");
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    say(`Stopped. ${error.message}`);
  }
}

function showError(error, turn, question) {
  const advice = error.code === "context_length_exceeded" ? " A new chat has room again." : "";
  conversation.follow(() => (turn.error = error.message + advice));
  say(turn.text === "" ? "No answer." : "The answer is not whole.");
  if (turn.text === "" && page.message.value === "") page.message.value = question;
}

async function ask(question) {
  const { turn, messages } = conversation.begin(question);
  const meter = new Meter();
  running = new AbortController();
  turn.busy = true;
  turn.facts = meter;
  setControls();
  say("Waiting for the answer…");
  try {
    const finishReason = await receive(messages, turn, meter, running.signal);
    say(finishReason === "length" ? "Ended at the token limit." : "Answered.");
  } catch (error) {
    if (error.name === "AbortError") await sayCancelled(turn.job);
    else if (error instanceof ServiceError) showError(error, turn, question);
    else throw error;
  } finally {
    if (meter.ttftMs === null) turn.facts = "";
    turn.busy = false;
    running = null;
    setControls();
  }
  conversation.keep(messages, turn);
}

function submit(question) {
  if (running !== null || page.send.disabled || question.trim() === "") return;
  if (!page.form.reportValidity()) return;
  page.message.value = "";
  page.message.focus();
  void ask(question);
}

page.form.addEventListener("submit", (event) => {
  event.preventDefault();
  submit(page.message.value);
});
page.message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(page.message.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
page.stop.addEventListener("click", () => {
  running?.abort();
  page.message.focus();
});
page.clear.addEventListener("click", () => {
  conversation.clear();
  say("A new conversation.");
  setControls();
  page.message.focus();
});
byId("suggestions").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) submit(button.textContent);
});

void loadModels();

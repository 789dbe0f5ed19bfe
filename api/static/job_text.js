/**
 * A job's prompt and answer as text, on its page: the prompt as the model got it, the answer as a
 * chat shows it. Reading them makes the page no reader of the job.
 */

import { element, setText } from "./element.js";
import { isLive } from "./job_state.js";
import { Markdown } from "./markdown.js";
import { ServiceError, getAnswer, getPrompt } from "./service.js";
import { ToolCalls } from "./tool_calls.js";
import { count } from "./units.js";

const FIRST_TOKENS = 16_384;
const MOST_TOKENS = 262_144;
const MIN_WAIT_MS = 1000; // between two reads of a running job's answer
const WAIT_SHARE = 10; // reading takes at most 1/10 of the time

const PROMPT_MISSING = {
  not_stored: "The prompt is no longer stored. It is kept with the job's record (PENSTOCK_JOB_RETENTION_S), and deleted earlier when many jobs end.",
  model_unknown: "No worker has announced this model lately, so the prompt cannot be shown as text.",
};

/** One choice: reasoning folded, text as Markdown, calls. */
class ChoiceText {
  node = element("section", "choice");
  #reasoning = element("details", "reasoning");
  #reasoningText = element("div", "text");
  #text = new Markdown();
  #calls = [];
  #shownCalls = new ToolCalls(this.#calls, () => {});

  constructor(title) {
    this.#reasoning.append(element("summary", "", "Reasoning"), this.#reasoningText);
    if (title !== null) this.node.append(element("h4", "", title));
    this.node.append(this.#reasoning, this.#text.node, this.#shownCalls.node);
  }

  show({ reasoning, text, tool_calls: calls }) {
    this.#reasoning.hidden = reasoning === "";
    setText(this.#reasoningText, reasoning);
    this.#text.show(text);
    this.#calls.splice(0, Infinity, ...calls);
    this.#shownCalls.show();
  }
}

/** The prompt, a page after the other on demand. */
class Prompt {
  #note = element("p", "none");
  #text = element("pre", "prompt-text log-text");
  #more = element("button", "", "Show more of the prompt");
  #jobId = null;
  #opened = 0; // how many jobs were, so that a read of an earlier one is known
  #next = 0;

  constructor(parent) {
    this.#text.tabIndex = 0;
    this.#text.setAttribute("aria-label", "Prompt");
    this.#text.setAttribute("role", "group");
    this.#more.type = "button";
    this.#more.addEventListener("click", () => void this.#read());
    parent.append(this.#note, this.#text, this.#more);
  }

  open(jobId) {
    this.#jobId = jobId;
    this.#opened += 1;
    this.#next = 0;
    this.#text.textContent = "";
    this.#text.hidden = this.#more.hidden = true;
    setText(this.#note, "Loading…");
    void this.#read();
  }

  async #read() {
    const opened = this.#opened;
    this.#more.disabled = true;
    try {
      const { text, missing, num_tokens: numTokens, next } = await getPrompt(this.#jobId, this.#next);
      if (opened !== this.#opened) return; // another job was opened
      this.#next = next;
      this.#text.hidden = text === null;
      if (text !== null) this.#text.append(text);
      this.#more.hidden = next === null;
      const place = next === null ? "" : ` The first ${count(next)} are shown.`;
      const all = `${count(numTokens)} tokens, as the model got them.${place}`;
      setText(this.#note, missing === null ? all : PROMPT_MISSING[missing]);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      if (opened !== this.#opened) return;
      setText(this.#note, error.message);
      this.#more.hidden = !error.isPassing; // to ask again
    } finally {
      this.#more.disabled = false;
    }
  }
}

/** The answer, read again while it grows. */
class Answer {
  #note = element("p", "none");
  #body = element("div", "answer");
  #all = element("button", "", "Show all of the answer");
  #job = null;
  #choices = [];
  #limit = FIRST_TOKENS;
  #shown = ""; // the state of the job that the answer on the page is of
  #isCut = false;
  #timer = null;
  #notBefore = 0;

  constructor(parent) {
    this.#all.type = "button";
    this.#all.addEventListener("click", () => {
      this.#limit = MOST_TOKENS;
      this.#readAgain();
    });
    parent.append(this.#note, this.#body, this.#all);
  }

  open() {
    clearTimeout(this.#timer);
    this.#timer = this.#job = null;
    this.#choices = [];
    this.#limit = FIRST_TOKENS;
    this.#shown = "";
    this.#isCut = false;
    this.#notBefore = 0;
    this.#body.replaceChildren();
    this.#all.hidden = true;
    setText(this.#note, "");
  }

  /** Shows the job's answer as far as it is, soon. */
  follow(job) {
    this.#job = job;
    if (this.#isCut || this.#timer !== null || stateOf(job) === this.#shown) return;
    this.#timer = setTimeout(() => void this.#read(job.id), this.#notBefore - performance.now());
  }

  #readAgain() {
    this.#shown = "";
    this.#isCut = false;
    this.follow(this.#job);
  }

  async #read(jobId) {
    const begunMs = performance.now();
    const shown = stateOf(this.#job);
    const timer = this.#timer;
    try {
      const answer = await getAnswer(jobId, this.#limit);
      if (timer !== this.#timer) return; // another job was opened
      this.#shown = shown;
      this.#isCut = answer.is_cut;
      this.#show(answer);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      if (timer !== this.#timer) return;
      if (!error.isPassing) this.#shown = shown; // not again before the job has changed
      setText(this.#note, error.message);
    }
    const tookMs = performance.now() - begunMs;
    this.#notBefore = performance.now() + Math.max(MIN_WAIT_MS, WAIT_SHARE * tookMs);
    this.#timer = null;
    this.follow(this.#job); // it may have grown meanwhile
  }

  #show({ choices, num_tokens: numTokens, is_cut: isCut, has_expired: hasExpired, message }) {
    choices.forEach((choice, index) => {
      if (this.#choices[index] === undefined) {
        const title = choices.length > 1 ? `Choice ${index + 1}` : null;
        this.#choices.push(new ChoiceText(title));
        this.#body.append(this.#choices[index].node);
      }
      this.#choices[index].show(choice);
    });
    this.#all.hidden = !isCut || this.#limit === MOST_TOKENS;
    const path = "GET /v1/jobs/{id}/stream has all of it.";
    const rest = this.#limit === MOST_TOKENS ? ` ${path}` : "";
    if (hasExpired) setText(this.#note, message);
    else if (isCut) setText(this.#note, `The first ${count(numTokens)} tokens.${rest}`);
    else if (numTokens > 0) setText(this.#note, "");
    else setText(this.#note, isLive(this.#job) ? "No tokens yet." : "The job has no output.");
  }
}

const stateOf = ({ status, usage }) => `${status} ${usage.completion_tokens}`;

export class JobText {
  #prompt;
  #answer;
  #jobId = null;

  /** `prompt`, `answer`: the elements that it fills. */
  constructor({ prompt, answer }) {
    this.#prompt = new Prompt(prompt);
    this.#answer = new Answer(answer);
  }

  /** Leaves the job that was shown. */
  open() {
    this.#jobId = null;
    this.#answer.open();
  }

  /** Shows the job's text, and follows its answer while it grows. */
  follow(job) {
    if (this.#jobId !== job.id) this.#prompt.open(job.id);
    this.#jobId = job.id;
    this.#answer.follow(job);
  }
}

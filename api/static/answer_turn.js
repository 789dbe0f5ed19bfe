/** An answer on the page: reasoning folded, text as Markdown, calls, error, facts, actions. */

import { hasOutput, isOver } from "./answer.js";
import { copyButton } from "./clipboard.js";
import { element, setText } from "./element.js";
import { resumedWords, waitingWords } from "./job_state.js";
import { Markdown } from "./markdown.js";
import { RawEvents } from "./raw_events.js";
import { ToolCalls } from "./tool_calls.js";
import { action } from "./turn.js";
import { plural } from "./units.js";

const OF_JOB = "The text of a job, as the model wrote it. The question is not stored as text.";
const MIN_SHOW_MS = 30;
const SHOW_SHARE = 5; // rendering takes at most 1/5 of the time

export class AnswerTurn {
  node = element("article", "turn assistant");
  #answer;
  #follow;
  #who = element("h3", "who");
  #reasoning = element("details", "reasoning");
  #reasoningSummary = element("summary");
  #reasoningText = element("div", "text");
  #body = element("div", "text");
  #text = new Markdown();
  #calls;
  #error = element("p", "error");
  #rescue = element("p", "rescue");
  #facts = element("p", "facts");
  #measures = element("span");
  #job = element("a", "job");
  #actions = element("div", "actions");
  #events = new RawEvents();
  #timer = null;
  #showMs = 0;
  #isDone = false;

  /**
   * `actions` has `regenerate()`, `results()`, `share()`, `showJob()`; `follow(change)` makes a
   * change that may grow the page.
   */
  constructor(answer, actions, follow) {
    this.#answer = answer;
    this.#follow = follow;
    this.#calls = new ToolCalls(answer.calls, actions.results);
    this.#reasoning.append(this.#reasoningSummary, this.#reasoningText);
    this.#body.append(this.#text.node);
    this.#job.title = "Link to this answer";
    this.#facts.append(this.#measures, " ", this.#job);
    this.#actions.append(
      copyButton("Copy the answer", () => answer.text),
      action("retry", "Regenerate", "Answer the question again", actions.regenerate),
      action("share", "Share", "Share this answer", actions.share),
      action("job", "Job", "Show the job", actions.showJob),
    );
    this.#error.setAttribute("role", "alert");
    this.node.append(this.#who);
    if (answer.isJob) this.node.append(element("p", "note", OF_JOB));
    this.node.append(this.#reasoning, this.#body, this.#calls.node);
    this.node.append(this.#error, this.#rescue, this.#facts, this.#actions, this.#events.node);
    this.show();
  }

  set facts(text) {
    setText(this.#measures, String(text));
  }

  /** Schedules a rendering after an event. `event`: as the service sent it. */
  changed(event) {
    this.#events.add(event);
    this.#timer ??= setTimeout(
      () => this.#follow(() => this.show()),
      Math.max(MIN_SHOW_MS, SHOW_SHARE * this.#showMs),
    );
  }

  /** Shows the answer as it is now. */
  show() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const answer = this.#answer;
    const beganMs = performance.now();
    const isBusy = !isOver(answer);
    // While busy, screen readers that look at it hold the text back until it is whole.
    this.node.setAttribute("aria-busy", String(isBusy));
    this.node.classList.toggle("busy", isBusy);
    setText(this.#who, answer.model ?? "Model");
    this.#showReasoning(isBusy);
    this.#body.hidden = answer.text === "" && (!isBusy || answer.reasoning !== "");
    const rescues = (answer.rescues ?? []).map((one) => ({ ...one, label: resumedWords(one) }));
    this.#text.show(answer.text, rescues.filter(({ at }) => at !== null));
    this.#showRescue(isBusy && answer.loss, rescues);
    this.#calls.show();
    this.#error.hidden = answer.error === null;
    if (answer.error !== null) setText(this.#error, answer.error);
    this.#job.hidden = answer.id === null;
    if (answer.id !== null) {
      setText(this.#job, answer.id);
      this.#job.href = `./#job=${encodeURIComponent(answer.id)}`;
    }
    this.#showActions(isBusy);
    this.#events.show();
    this.#showMs = performance.now() - beganMs;
  }

  /** A badge under an answer that lost a worker, and while it has none. */
  #showRescue(loss, rescues) {
    const words = rescues.map((one) => one.label);
    if (loss) words.push(waitingWords(loss));
    this.#rescue.hidden = words.length === 0;
    this.#rescue.classList.toggle("waiting", Boolean(loss));
    setText(this.#rescue, words.join(" · "));
  }

  #showReasoning(isBusy) {
    const { reasoning, numReasoning, text, calls } = this.#answer;
    this.#reasoning.hidden = reasoning === "";
    if (reasoning === "") return;
    const isThinking = isBusy && text === "" && calls.length === 0;
    this.#reasoning.classList.toggle("thinking", isThinking);
    const word = isThinking ? "Thinking" : "Reasoning";
    setText(this.#reasoningSummary, `${word} · ${plural(numReasoning, "token")}`);
    setText(this.#reasoningText, reasoning);
  }

  #showActions(isBusy) {
    const [copy, regenerate, share, job] = this.#actions.children;
    copy.hidden = this.#answer.text === "";
    regenerate.hidden = isBusy || this.#answer.isJob === true; // its question is not known
    share.hidden = this.#answer.id === null || this.#answer.status === "lost";
    job.hidden = share.hidden;
    if (isBusy || this.#isDone) return;
    this.#isDone = true;
    if (hasOutput(this.#answer)) this.#calls.askForResults();
  }
}

/** The page of one job: timeline, attempts, text, details, events, record; cancel, and run again. */

import { newBadge } from "./badge.js";
import { element, setText } from "./element.js";
import { JobEvents } from "./job_events.js";
import { isLive, jobLink, queueing, rateOf, reasonOf, setJobState } from "./job_state.js";
import { JobText } from "./job_text.js";
import { timeOf } from "./operator_tables.js";
import { give } from "./orders.js";
import { ServiceError, cancelJob, getJob, getPrefix, requeueJob } from "./service.js";
import { Table, text } from "./table.js";
import { Timeline } from "./timeline.js";
import { count, duration, rate } from "./units.js";

const OUTCOMES = {
  ended: "ended the job",
  died: "worker lost; the job resumed",
  handed_over: "returned the job to the queue",
};

const attemptTable = (body) =>
  new Table(
    body,
    [
      text("Attempt", ({ attempt }) => String(attempt.attempt), "number"),
      text("Worker", ({ attempt }) => attempt.worker, "id"),
      text("Started after", ({ attempt, job }) => duration(1000 * (attempt.started_at - job.created_at)), "number"),
      text("Tokens at start", ({ attempt }) => count(attempt.completion_tokens), "number"),
      text("Outcome", ({ attempt, job }) => {
        const isLast = attempt.attempt === job.attempt;
        if (attempt.outcome === "died" && isLast) return "worker lost";
        return OUTCOMES[attempt.outcome] ?? "running";
      }),
    ],
    ({ attempt }) => attempt.attempt,
  );

const cachedOf = ({ usage }) => {
  const cached = usage.prompt_tokens_details.cached_tokens;
  return count(usage.prompt_tokens) + (cached > 0 ? `, ${count(cached)} of them cached` : "");
};

const PLACED = {
  prefix: "its prefix in the worker's cache",
  late: "any worker, as the one with its prefix did not take it in time",
  any: "no preference",
};

const FACTS = [
  ["Model", (job) => job.model],
  ["Kind", (job) => job.kind],
  ["Tenant", (job) => job.tenant],
  ["Worker", (job) => job.worker ?? "–"],
  ["Submitted", (job) => timeOf(job.created_at)],
  ["Queued for", queueing],
  ["Preempted", (job) => (job.preemptions > 0 ? `${count(job.preemptions)} times by higher lanes` : "–")],
  ["First token after", (job) => duration(job.timings.ttft_ms)],
  ["Total", (job) => duration(job.timings.total_ms)],
  ["Prompt tokens", cachedOf],
  ["Output tokens", (job) => count(job.usage.completion_tokens)],
  ["Tokens per second", (job) => rate(rateOf(job))],
  ["Choices", (job) => count(job.num_choices)],
  ["Durability", (job) => job.durability],
  ["Placed by", (job) => PLACED[job.placed] ?? "–"],
  ["Client request id", (job) => job.client_request_id ?? "–"],
];

export class JobPage {
  #parts;
  #badge = newBadge();
  #timeline = new Timeline();
  #attempts;
  #text;
  #events;
  #job = null;
  #prefixOf = null; // the job whose prefix was requested

  /** `parts`: the elements of the page that it fills. */
  constructor(parts) {
    this.#parts = parts;
    this.#attempts = attemptTable(parts.attempts);
    this.#text = new JobText(parts.words);
    this.#events = new JobEvents(parts.events);
    parts.badge.append(this.#badge);
    parts.timeline.append(this.#timeline.node);
    for (const [name] of FACTS) {
      const fact = element("div");
      fact.append(element("dt", "", name), element("dd"));
      parts.facts.append(fact);
    }
    parts.cancel.addEventListener("click", () => void this.#cancel());
    parts.requeue.addEventListener("click", () => void this.#requeue());
    parts.record.addEventListener("toggle", () => void this.#showRecord());
  }

  /** Stops reading: the page is left. */
  close() {
    this.#job = null;
    this.#text.open();
  }

  /** Opens a job before its data has arrived. */
  open(jobId) {
    this.#job = null;
    setText(this.#parts.title, `Job ${jobId}`);
    this.#say("Loading…");
    this.#parts.known.hidden = true;
    this.#prefixOf = null;
    for (const part of ["prefix", "prefixText", "prefixEarlier"]) this.#showPrefix(part, null);
    this.#parts.record.open = false;
    this.#text.open();
    this.#events.open(jobId);
    this.#parts.title.focus();
  }

  /** Shows the job as the feed has it. */
  show({ job, dead_letter: deadLetter, service }) {
    const parts = this.#parts;
    if (job === null) {
      this.#say("This job's record has expired.");
      parts.known.hidden = true;
      return;
    }
    if (this.#job === null) this.#say("");
    const wasLive = this.#job !== null && isLive(this.#job);
    this.#job = job;
    parts.known.hidden = false;
    setText(parts.title, `Job ${job.id}`);
    parts.text.href = `./${jobLink(job.id)}`;
    setJobState(this.#badge, job);
    if (wasLive && !isLive(job)) this.#say(`The job is ${job.status}.`);
    setText(parts.reason, reasonOf(job));
    parts.cancel.hidden = !isLive(job);
    parts.requeue.hidden = !deadLetter || deadLetter.requeued_as !== null;
    parts.successor.hidden = !deadLetter?.requeued_as;
    if (deadLetter?.requeued_as) parts.successor.href = jobLink(deadLetter.requeued_as);
    this.#timeline.show(job, service.now);
    this.#attempts.show(job.attempts.map((attempt) => ({ attempt, job })));
    parts.noAttempts.hidden = job.attempts.length > 0;
    FACTS.forEach(([, read], index) => setText(parts.facts.children[index].lastChild, read(job)));
    this.#text.follow(job);
    this.#events.follow(job);
    if (!isLive(job) && this.#prefixOf !== job.id) void this.#explainPrefix(job.id);
  }

  /** Shows once, after a job's end, why its prompt was cached or computed again. */
  async #explainPrefix(jobId) {
    this.#prefixOf = jobId;
    try {
      const prefix = await getPrefix(jobId);
      if (this.#prefixOf !== jobId) return; // another job was opened
      const { sentence, text, earlier_text: earlier } = prefix;
      this.#showPrefix("prefix", sentence);
      this.#showPrefix("prefixText", text && `In this prompt: ${text}`);
      this.#showPrefix("prefixEarlier", earlier && `In the earlier job: ${earlier}`);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      if (this.#prefixOf === jobId) this.#showPrefix("prefix", error.message);
    }
  }

  /** Shows the job as the API has it, as it is when the record is opened. */
  async #showRecord() {
    const { record } = this.#parts;
    if (!record.open) return;
    try {
      setText(record.lastElementChild, JSON.stringify(await getJob(this.#job.id), null, 2));
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      setText(record.lastElementChild, error.message);
    }
  }

  #showPrefix(part, text) {
    this.#parts[part].hidden = !text;
    setText(this.#parts[part], text ?? "");
  }

  /** Shows the error, unless a job is shown already. */
  showTrouble(error) {
    if (this.#job === null) this.#say(error.message);
  }

  #say(sentence) {
    setText(this.#parts.note, sentence);
  }

  async #cancel() {
    const { id } = this.#job;
    await this.#give(this.#parts.cancel, async () => {
      const { status } = await cancelJob(id);
      return `The job is ${status}.`;
    });
  }

  async #requeue() {
    const { id } = this.#job;
    await this.#give(this.#parts.requeue, async () => {
      const job = await requeueJob(id);
      location.hash = jobLink(job.id);
      return `Run again as ${job.id}.`;
    });
  }

  /** The focus moves from the button to the job's title. */
  async #give(button, order) {
    if (await give(this.#parts.note, button, order)) this.#parts.title.focus();
  }
}

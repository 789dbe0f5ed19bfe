/** The log of a job: a run of tokens for each attempt, whose single events show on demand. */

import { element, setText } from "./element.js";
import { ServiceError, listJobEvents } from "./service.js";
import { Table, text } from "./table.js";
import { count, duration, plural } from "./units.js";

const LIMIT = 50;
const LAST_BYTE = "9223372036854775807"; // of a token: the cursor after everything up to it
const CHOICES = "Choices"; // a column of jobs with several

function shown(event) {
  if (event.type === "prompt") return "log probabilities of the prompt";
  if (event.type === "end") {
    return [event.status, event.reason, event.text].filter(Boolean).join(" · ");
  }
  return event.is_cut ? `${event.text}…` : event.text;
}

const COLUMNS = [
  text("Id", (event) => event.id, "id"),
  text("Event", (event) => event.type),
  text("Tokens", (event) => (event.type === "delta" ? count(event.num_tokens) : ""), "number"),
  text(CHOICES, (event) => event.choices.map((choice) => choice + 1).join(", "), "number"),
  text("Text", shown, "log-text"),
];

/**
 * The runs of a job's tokens, one for each attempt that wrote any: {first, last, attempt, seconds}.
 * `attempt` is null for tokens of attempts that are no longer listed, `seconds` while unknown.
 */
function runsOf({ attempts, usage, ended_at: endedAt }) {
  const total = usage.completion_tokens;
  const earlier = attempts[0]?.completion_tokens ?? total;
  const runs = [{ first: 1, last: earlier, attempt: null, seconds: null }];
  attempts.forEach((attempt, index) => {
    const next = attempts[index + 1];
    const end = attempt.ended_at ?? (next === undefined ? endedAt : null);
    runs.push({
      first: attempt.completion_tokens + 1,
      last: next?.completion_tokens ?? total,
      attempt,
      seconds: end === null ? null : end - attempt.started_at,
    });
  });
  return runs.filter(({ first, last }) => last >= first);
}

function sentence({ first, last, attempt, seconds }) {
  const tokens = first === last ? `Token ${count(first)}` : `Tokens ${count(first)}–${count(last)}`;
  const parts = [tokens];
  parts.push(attempt === null ? "earlier attempts" : `attempt ${attempt.attempt} on ${attempt.worker}`);
  if (seconds !== null) parts.push(duration(1000 * seconds));
  return parts.join(" · ");
}

/** A run: a line, and a page of its events while it is open. */
class Run {
  node = element("li");
  #details = element("details", "run");
  #summary = element("summary");
  #note = element("p", "none");
  #scroller = element("div", "wide");
  #next = element("button", "", "Next events");
  #first = element("button", "", "First events");
  #table;
  #jobId;
  #run = null;
  #isLast = true; // whether the job's end follows
  #after = []; // of the pages up to this one
  #page = null;
  #numTokens = -1; // of the run, when the page was read
  #reading = null;

  constructor(jobId, hasChoices) {
    this.#jobId = jobId;
    const columns = COLUMNS.filter(({ heading }) => hasChoices || heading !== CHOICES);
    const table = element("table");
    this.#table = new Table(table.createTBody(), columns, ({ id }) => id);
    this.#scroller.tabIndex = 0;
    this.#scroller.setAttribute("role", "group");
    this.#scroller.setAttribute("aria-label", "Events");
    this.#scroller.append(table);
    const buttons = element("p", "pages");
    buttons.append(this.#first, this.#next);
    this.#first.type = this.#next.type = "button";
    this.#first.hidden = this.#next.hidden = true;
    this.#details.append(this.#summary, this.#note, this.#scroller, buttons);
    this.node.append(this.#details);
    this.#details.addEventListener("toggle", () => this.#follow());
    this.#next.addEventListener("click", () => {
      const last = this.#page?.data.at(-1); // none while a page is read
      if (last) this.#turn([...this.#after, last.id]);
      else this.#read(this.#run.last);
    });
    this.#first.addEventListener("click", () => this.#turn(this.#after.slice(0, 1)));
  }

  /** Shows a run as it is now. */
  show(run, isLast) {
    if (this.#run === null) this.#after = [run.first === 1 ? null : `${run.first - 1}-${LAST_BYTE}`];
    this.#run = run;
    this.#isLast = isLast;
    setText(this.#summary, sentence(run));
    this.#follow();
  }

  /** Reads again if it is open, has more events and the page has room. */
  #follow() {
    const { last } = this.#run;
    const isFull = this.#page?.has_more || this.#page?.data.some(({ type }) => type === "end");
    if (!this.#details.open || isFull || last === this.#numTokens) return;
    this.#read(last);
  }

  #turn(after) {
    this.#after = after;
    this.#page = null;
    this.#read(this.#run.last);
    this.#scroller.focus();
  }

  /** One read at a time: another one starts after it. */
  #read(numTokens) {
    this.#numTokens = numTokens;
    this.#reading = (this.#reading ?? Promise.resolve()).then(() => this.#look());
  }

  async #look() {
    const after = this.#after.at(-1);
    try {
      const page = this.#within(await listJobEvents(this.#jobId, after, LIMIT));
      if (after !== this.#after.at(-1)) return;
      this.#page = page;
      this.#table.show(page.data);
      this.#next.hidden = !page.has_more;
      this.#first.hidden = this.#after.length === 1;
      setText(this.#note, this.#sentence(page));
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      setText(this.#note, error.message);
      this.#numTokens = -1; // the next state reads again
    }
  }

  /** The page without the events of the runs after this one. */
  #within(page) {
    if (this.#isLast) return page;
    const data = page.data.filter(({ id }) => Number(id.split("-")[0]) <= this.#run.last);
    return { ...page, data, has_more: page.has_more && data.length === page.data.length };
  }

  #sentence({ data, has_more: hasMore, has_expired: hasExpired }) {
    if (hasExpired) return "The text of this job was lost.";
    if (data.length === 0) return "No events yet.";
    const place = `Page ${this.#after.length}: ${plural(data.length, "event")}`;
    return hasMore ? `${place}, and more.` : `${place}.`;
  }
}

export class JobEvents {
  #list;
  #end;
  #runs = new Map(); // by their first token
  #jobId = null;

  /** `list`: of the runs; `end`: a line for how the job ended, or that it has no events. */
  constructor({ list, end }) {
    this.#list = list;
    this.#end = end;
  }

  /** Leaves the job that was shown. */
  open(jobId) {
    this.#jobId = jobId;
    this.#runs.clear();
    this.#list.replaceChildren();
    setText(this.#end, "");
  }

  /** Shows the runs of a job as it is now. */
  follow(job) {
    const runs = runsOf(job);
    runs.forEach((run, index) => {
      if (!this.#runs.has(run.first)) {
        const made = new Run(this.#jobId, job.num_choices > 1);
        this.#runs.set(run.first, made);
        this.#list.append(made.node);
      }
      this.#runs.get(run.first).show(run, index === runs.length - 1);
    });
    const reason = job.finish_reason ?? job.error?.code;
    const end = [`End: ${job.status}`, reason, job.error?.message].filter(Boolean).join(" · ");
    setText(this.#end, job.ended_at === null ? (runs.length > 0 ? "" : "No events yet.") : end);
  }
}

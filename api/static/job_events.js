/** The log of a job, a page at a time: the last one grows while the job runs. */

import { element, setText } from "./element.js";
import { ServiceError, listJobEvents } from "./service.js";
import { Table, text } from "./table.js";
import { count, plural } from "./units.js";

const LIMIT = 50;

function shown(event) {
  if (event.type === "prompt") return "log probabilities of the prompt";
  if (event.type === "end") {
    return [event.status, event.reason, event.text].filter(Boolean).join(" · ");
  }
  return event.is_cut ? `${event.text}…` : event.text;
}

export class JobEvents {
  #body;
  #note;
  #next;
  #first;
  #table;
  #jobId = null;
  #after = [null]; // of the pages up to this one
  #page = null;
  #numTokens = -1; // of the job, when the page was read
  #looking = null;

  constructor({ body, note, next, first }) {
    this.#body = body;
    this.#note = note;
    this.#next = next;
    this.#first = first;
    this.#table = new Table(
      body,
      [
        text((event) => event.id, "id"),
        text((event) => event.type),
        text((event) => (event.type === "delta" ? count(event.num_tokens) : ""), "number"),
        text((event) => (event.choices.length > 0 ? event.choices.join(", ") : ""), "number"),
        text(shown, "log-text"),
      ],
      (event) => event.id,
    );
    next.addEventListener("click", () => {
      const last = this.#page?.data.at(-1);
      if (last !== undefined) this.#after.push(last.id);
      this.#moved();
    });
    first.addEventListener("click", () => {
      this.#after = [null];
      this.#moved();
    });
  }

  /** Shows the first page of a job's events. */
  open(jobId) {
    this.#jobId = jobId;
    this.#after = [null];
    this.#page = null;
    this.#numTokens = -1;
    this.#table.show([]);
    setText(this.#note, "");
    this.#first.hidden = this.#next.hidden = true;
  }

  /** Reads again if the job has more events and this page has room. */
  follow(job) {
    const numTokens = job.usage.completion_tokens + (job.ended_at === null ? 0 : 1);
    if (this.#page?.has_more || numTokens === this.#numTokens) return;
    void this.#look(numTokens);
  }

  #moved() {
    this.#page = null;
    void this.#look(this.#numTokens);
    this.#body.closest("[tabindex]").focus();
  }

  /** One read at a time: another one starts after it. */
  async #look(numTokens) {
    this.#numTokens = numTokens;
    const asked = (this.#looking ?? Promise.resolve()).then(() => this.#read());
    this.#looking = asked;
    await asked;
    if (this.#looking === asked) this.#looking = null;
  }

  async #read() {
    const jobId = this.#jobId;
    const after = this.#after.at(-1);
    try {
      const page = await listJobEvents(jobId, after, LIMIT);
      if (jobId !== this.#jobId || after !== this.#after.at(-1)) return;
      this.#page = page;
      this.#table.show(page.data);
      this.#next.hidden = !page.has_more;
      this.#first.hidden = after === null;
      setText(this.#note, this.#sentence(page));
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      setText(this.#note, error.message);
      this.#numTokens = -1; // the next state reads again
    }
  }

  #sentence({ data, has_more: hasMore, has_expired: hasExpired }) {
    if (hasExpired) return "The text of this job was lost.";
    if (data.length === 0) return "No events yet.";
    const place = `Page ${this.#after.length}: ${plural(data.length, "event")}`;
    return hasMore ? `${place}, and more.` : `${place}.`;
  }
}

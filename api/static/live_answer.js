/**
 * A running answer: sent once, then followed to its end over any number of connections.
 *
 * The job belongs to no connection, so that only `stop` ends it. `leave` ends the following.
 */

import { abandon, applyEvent, isOver } from "./answer.js";
import { keyGiven } from "./key.js";
import { followJob } from "./job_stream.js";
import { cancelResponse, createResponse, followResponse } from "./responses.js";
import { ServiceError, cancelJob } from "./service.js";

const FIRST_RETRY_MS = 250;
const MAX_RETRY_MS = 5000;
const GONE = "The server no longer has this answer.";

const follow = ({ isJob, id, last }, signal) =>
  isJob ? followJob(id, last, signal) : followResponse(id, last, signal);

/** Cancels the job of an answer. Throws ServiceError. */
export const cancelAnswer = ({ isJob, id }) => (isJob ? cancelJob(id) : cancelResponse(id));

/** Resolves after `ms`, when the network is back, or when `signal` aborts. */
function pause(ms, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      removeEventListener("online", done);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    addEventListener("online", done);
    signal.addEventListener("abort", done);
  });
}

export class LiveAnswer {
  #answer;
  #reader;
  #left = new AbortController();
  #retryMs = FIRST_RETRY_MS;
  #isAway = false;
  #wantsStop = false;

  /** `reader` has `changed(event)`, `created()` and `say(sentence)`. */
  constructor(answer, reader) {
    this.#answer = answer;
    this.#reader = reader;
  }

  /** Resolves when the answer is over, or was left. */
  async run() {
    const { signal } = this.#left;
    while (!isOver(this.#answer) && !signal.aborted) {
      try {
        await this.#advance(signal);
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof ServiceError)) throw error;
        await this.#outlive(error, signal);
      }
    }
  }

  /** Cancels the job; the answer then ends by itself. If the server does not respond, a second call leaves. */
  async stop() {
    const answer = this.#answer;
    if (this.#isAway && (this.#wantsStop || answer.id === null)) {
      if (answer.id === null) abandon(answer, "Stopped before the server confirmed the question.");
      this.leave();
      return;
    }
    this.#wantsStop = true;
    if (answer.id === null) return;
    this.#reader.say("Stopping…");
    try {
      await cancelAnswer(answer);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      this.#reader.say(error.message); // sent again when the connection is back
    }
  }

  leave() {
    this.#left.abort();
  }

  async #advance(signal) {
    const answer = this.#answer;
    if (answer.id === null) {
      answer.id = await createResponse(answer.body, answer.key, signal);
      answer.body = null;
      this.#reader.created();
    }
    if (this.#wantsStop) await cancelAnswer(answer);
    for await (const event of follow(answer, signal)) {
      this.#isAway = false;
      this.#retryMs = FIRST_RETRY_MS;
      applyEvent(answer, event);
      this.#reader.changed(event);
    }
    if (!isOver(answer)) throw new ServiceError("The connection ended before the answer did.");
  }

  async #outlive(error, signal) {
    const answer = this.#answer;
    if (error.status === 401 && answer.id !== null) {
      this.#reader.say(error.message);
      await Promise.race([keyGiven(), pause(2 ** 31 - 1, signal)]);
      return;
    }
    // A request refused with a status was not accepted; one without a response may have been, and
    // returns the same response when it is sent again with its key.
    const mayPass = answer.id === null ? error.status === 0 : error.isPassing;
    if (!mayPass) {
      const isGone = answer.id !== null && error.status === 404;
      abandon(answer, isGone ? GONE : error.message, error.code);
      return;
    }
    this.#isAway = true;
    this.#reader.say(`${error.message} Trying again…`);
    await pause(this.#retryMs, signal);
    this.#retryMs = Math.min(2 * this.#retryMs, MAX_RETRY_MS);
  }
}

/**
 * The live state of the dashboard: one stream of the service, a snapshot and then its changes. While
 * the page is out of sight there is no stream.
 */

import { keyGiven } from "./key.js";
import { ServiceError, request } from "./service.js";
import { readEvents } from "./sse.js";

const SILENCE_MS = 45_000; // keep-alives come more often: the server hangs
const FIRST_WAIT_MS = 500;
const MAX_WAIT_MS = 10_000;

/** The state with an event's objects, and its rows among those that are still listed. */
function merged(state, { lists, ...objects }) {
  const now = { ...state, ...objects, lists: { ...state.lists } };
  for (const [name, { ids, rows }] of Object.entries(lists)) {
    const before = state.lists[name] ?? { ids: [], rows: {} };
    const known = { ...before.rows, ...rows };
    const listed = ids ?? before.ids;
    now.lists[name] = {
      ids: listed,
      rows: Object.fromEntries(listed.map((id) => [id, known[id]])),
    };
  }
  return now;
}

/** The rows of a list in its order; null: it has not arrived yet. */
export const rowsOf = (state, name) =>
  state.lists[name]?.ids.map((id) => state.lists[name].rows[id]) ?? null;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const inSight = () =>
  new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });

export class Feed {
  #onState;
  #onTrouble;
  #abort = null;
  #query = null; // that is followed

  /** `onState(state)`: {service, job, dead_letter, lists}; `onTrouble(error)`: a ServiceError. */
  constructor(onState, onTrouble) {
    this.#onState = onState;
    this.#onTrouble = onTrouble;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#abort?.abort();
    });
  }

  /** Follows this query, {history, and filters of jobs} or {job}, and no other one any more. */
  open(query) {
    this.#query = query;
    this.#abort?.abort();
    void this.#follow(query);
  }

  async #follow(query) {
    const given = Object.entries(query).filter(([, value]) => value);
    const path = `v1/deployment/stream?${new URLSearchParams(given)}`;
    let waitMs = FIRST_WAIT_MS;
    for (;;) {
      await inSight();
      if (query !== this.#query) return;
      try {
        if (await this.#read(path, query)) waitMs = FIRST_WAIT_MS;
      } catch (error) {
        if (!(error instanceof ServiceError)) throw error;
        if (query !== this.#query) return;
        this.#onTrouble(error);
        if (error.status === 401) await keyGiven();
        else if (query.job && [404, 410].includes(error.status)) return; // there is no such job
        else waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
      }
      await pause(waitMs * (0.5 + Math.random() / 2));
    }
  }

  /** Reads one stream to its end. Returns whether it had an event. Throws ServiceError. */
  async #read(path, query) {
    let state = { lists: {} };
    let hasTold = false;
    for await (const { event, data } of this.#events(path)) {
      if (query !== this.#query) break;
      state = merged(event === "snapshot" ? { lists: {} } : state, JSON.parse(data));
      hasTold = true;
      this.#onState(state);
    }
    return hasTold;
  }

  /** Yields the events of one stream, until it ends or is aborted. Throws ServiceError. */
  async *#events(path) {
    const abort = new AbortController();
    this.#abort = abort;
    let isSilent = false;
    let timer = null;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        isSilent = true;
        abort.abort();
      }, SILENCE_MS);
    };
    heard();
    try {
      const response = await request(path, { signal: abort.signal });
      yield* readEvents(response.body, heard);
    } catch (error) {
      if (isSilent) throw new ServiceError("The server does not answer.");
      if (abort.signal.aborted) return; // out of sight, or another query
      if (error instanceof ServiceError) throw error;
      throw new ServiceError("The server cannot be reached."); // it broke off
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }
}

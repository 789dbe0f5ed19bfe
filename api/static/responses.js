/**
 * Responses of the service. One is created in the background, so that it belongs to no connection;
 * its events are read from any of them on, at any frontend, as often as need be.
 */

import { ServiceError, look, request, sentence } from "./service.js";
import { readEvents } from "./sse.js";

// A stream sends a keep-alive every 15 s at the latest: a longer silence is a dead connection.
const SILENCE_MS = 45_000;
const NO_RETRY = new Set(["job_lost", "stream_diverged"]);

const path = (id) => `v1/responses/${encodeURIComponent(id)}`;

/** What broke off a fetch or a body, as a ServiceError; an AbortError stays one. */
function broken(error) {
  if (error.name === "AbortError" || error instanceof ServiceError) return error;
  const isGarbled = error instanceof SyntaxError || error instanceof RangeError;
  return isGarbled
    ? new ServiceError("The server sent an answer that cannot be read.", { isPassing: false })
    : new ServiceError("The connection was lost.");
}

/**
 * Creates a response and returns its id. The same `key` with the same body is the same response,
 * so that a request whose answer was lost can be sent again. Throws AbortError and ServiceError.
 */
export async function createResponse(body, key, signal) {
  const response = await request("v1/responses", {
    method: "POST",
    headers: { "content-type": "application/json", "idempotency-key": key },
    body: JSON.stringify({ ...body, background: true }),
    signal,
  });
  try {
    return (await response.json()).id;
  } catch (error) {
    throw broken(error);
  }
}

/**
 * Yields the events of a response behind number `after` (-1: all) to its end. Throws AbortError
 * when `signal` aborts, and ServiceError for a refusal, an error event and a lost connection.
 */
export async function* followResponse(id, after, signal) {
  const query = new URLSearchParams({ stream: "true" });
  if (after >= 0) query.set("starting_after", after);
  const silence = new AbortController();
  let timer = null;
  const restartTimer = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  restartTimer();
  try {
    const response = await request(`${path(id)}?${query}`, {
      headers: { accept: "text/event-stream" },
      signal: AbortSignal.any([signal, silence.signal]),
    });
    for await (const { data } of readEvents(response.body, restartTimer)) {
      const event = JSON.parse(data);
      if (event.type === "error") {
        const isPassing = !NO_RETRY.has(event.code);
        throw new ServiceError(sentence(event.message), { code: event.code, isPassing });
      }
      yield event;
    }
  } catch (error) {
    const isSilence = error.name === "AbortError" && !signal.aborted;
    throw isSilence ? new ServiceError("The server does not answer.") : broken(error);
  } finally {
    clearTimeout(timer);
  }
}

export const getResponse = (id) => look(path(id));
export const cancelResponse = (id) => look(`${path(id)}/cancel`, "POST");

/** The items that a response was made from, the first first; at most 100. */
export async function listInputItems(id) {
  return (await look(`${path(id)}/input_items?limit=100&order=asc`)).data;
}

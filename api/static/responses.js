/**
 * Responses of the service. One is created in the background, so that it belongs to no connection;
 * its events are read from any of them on, at any frontend, as often as need be.
 */

import { ServiceError, look, request, sentence } from "./service.js";
import { broken, streamOf } from "./stream.js";

const NO_RETRY = new Set(["job_lost", "job_expired", "stream_diverged"]);

const path = (id) => `v1/responses/${encodeURIComponent(id)}`;

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
 * Yields the events of a response after number `after` (-1: all) to its end. Throws as `streamOf`
 * does, and ServiceError for an error event.
 */
export async function* followResponse(id, after, signal) {
  const query = new URLSearchParams({ stream: "true" });
  if (after >= 0) query.set("starting_after", after);
  for await (const { payload: event } of streamOf(`${path(id)}?${query}`, signal)) {
    if (event.type === "error") {
      const isPassing = !NO_RETRY.has(event.code);
      throw new ServiceError(sentence(event.message), { code: event.code, isPassing });
    }
    yield event;
  }
}

export const isResponseId = (id) => id.startsWith("resp_");
export const cancelResponse = (id) => look(`${path(id)}/cancel`, "POST");

/** The items that a response was made from, the first first; at most 100. */
export async function listInputItems(id) {
  return (await look(`${path(id)}/input_items?limit=100&order=asc`)).data;
}

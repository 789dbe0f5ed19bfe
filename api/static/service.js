/** The service's HTTP API as the pages use it. Paths are relative, so a prefix in front is fine. */

import { askForKey, keyHeaders } from "./key.js";
import { readEvents } from "./sse.js";

/** A refusal or failure with a sentence for the reader. `code` is the service's, or null. */
export class ServiceError extends Error {
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.name = "ServiceError";
    this.status = status;
    this.code = code;
  }
}

function sentence(text) {
  const trimmed = text.trim();
  const begun = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?…]$/.test(begun) ? begun : `${begun}.`;
}

/** The sentence of an OpenAI error object, or null when `body` is not one. */
function errorOf(body, status) {
  const error = body?.error;
  if (error === null || typeof error !== "object" || typeof error.message !== "string") return null;
  return new ServiceError(sentence(error.message || "The service gave no reason"), {
    status,
    code: error.code ?? null,
  });
}

async function refusal(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not ours: a proxy's page, for example. The status is all there is to say.
  }
  const error =
    errorOf(body, response.status) ??
    new ServiceError(`The server answered with status ${response.status}.`, {
      status: response.status,
    });
  const retryAfter = Number(response.headers.get("retry-after"));
  if (retryAfter > 0) error.message += ` The server asks to wait ${Math.ceil(retryAfter)} s.`;
  return error;
}

async function request(path, options = {}) {
  let response;
  try {
    const headers = { ...keyHeaders(), ...options.headers };
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ServiceError("The server cannot be reached.");
  }
  if (response.status === 401) askForKey();
  if (!response.ok) throw await refusal(response);
  return response;
}

const LOOK_TIMEOUT_MS = 10_000;

async function look(path, method = "GET") {
  try {
    const response = await request(path, { method, signal: AbortSignal.timeout(LOOK_TIMEOUT_MS) });
    return await response.json();
  } catch (error) {
    if (error.name === "TimeoutError") throw new ServiceError("The server does not answer.");
    if (error instanceof SyntaxError) throw new ServiceError("The server's answer is not JSON.");
    throw error;
  }
}

export const jobPath = (jobId) => `v1/jobs/${encodeURIComponent(jobId)}`;

/** State of store and queue, and the workers; also while the service says that it is not well. */
export const getHealth = () => look("health");
export const listModels = async () => (await look("v1/models")).data;
export const getJob = (jobId) => look(jobPath(jobId));
export async function listJobs(state, limit) {
  const query = new URLSearchParams({ limit });
  if (state) query.set("state", state);
  return (await look(`v1/jobs?${query}`)).data;
}

export const cancelJob = (jobId) => look(jobPath(jobId), "DELETE");

/**
 * Streams one chat completion. Calls `onJob(id)` as soon as the job is known, then yields the
 * chunks. Aborting `signal` ends the fetch, which cancels the job. Throws AbortError then, and
 * ServiceError for refusals, error events and a stream that ends before its [DONE].
 */
export async function* streamChat(body, signal, onJob) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let jobId = response.headers.get("x-request-id");
  if (jobId) onJob(jobId);
  try {
    for await (const { data } of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      const error = errorOf(chunk, response.status);
      if (error) throw error;
      if (chunk.id && chunk.id !== jobId) {
        jobId = chunk.id;
        onJob(jobId);
      }
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServiceError) throw error;
    const broken = error instanceof SyntaxError || error instanceof RangeError;
    throw new ServiceError(
      broken ? "The server sent an event that cannot be read." : "The connection was lost.",
    );
  }
  throw new ServiceError("The connection ended before the answer did.");
}

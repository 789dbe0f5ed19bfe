/** The service's HTTP API as the pages use it. Paths are relative, so a prefix in front is fine. */

import { askForKey, keyHeaders } from "./key.js";

const PASSING = new Set([0, 502, 503, 504]);

/**
 * A refusal or failure with a sentence for the reader. `status` is 0 where the server was not
 * reached or its stream broke; `code` is the service's, or null; `isPassing`: the same request may
 * succeed in a while.
 */
export class ServiceError extends Error {
  constructor(message, { status = 0, code = null, isPassing = PASSING.has(status) } = {}) {
    super(message);
    this.name = "ServiceError";
    this.status = status;
    this.code = code;
    this.isPassing = isPassing;
  }
}

/** A text of the service as a sentence. */
export function sentence(text) {
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
    // Not ours: a proxy's page, for example. Only its status is known.
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

/** Fetches with the key. Throws AbortError, TimeoutError and ServiceError. */
export async function request(path, options = {}) {
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

/** Fetches JSON. Throws ServiceError. */
export async function look(path, method = "GET", options = {}) {
  try {
    const signal = AbortSignal.timeout(LOOK_TIMEOUT_MS);
    const response = await request(path, { ...options, method, signal });
    return await response.json();
  } catch (error) {
    if (error.name === "TimeoutError") throw new ServiceError("The server does not answer.");
    if (error instanceof SyntaxError) throw new ServiceError("The server's answer is not JSON.");
    if (error instanceof TypeError) throw new ServiceError("The connection was lost."); // mid-answer
    throw error;
  }
}

/** Sends JSON, or nothing, and fetches JSON. Throws ServiceError. */
export function post(path, body) {
  if (body === undefined) return look(path, "POST");
  const headers = { "content-type": "application/json" };
  return look(path, "POST", { body: JSON.stringify(body), headers });
}

export const jobPath = (jobId) => `v1/jobs/${encodeURIComponent(jobId)}`;

/** A page of jobs: {data, next, searched}. `query`: filters, `after` and `limit`. */
export const listJobs = (query) => look(`v1/jobs?${new URLSearchParams(query)}`);

export const drainWorker = (id) => post(`v1/workers/${encodeURIComponent(id)}/drain`);
export const resumeWorker = (id) => post(`v1/workers/${encodeURIComponent(id)}/resume`);
/** `what`: "pause" or "resume". A name may have slashes. */
export const orderQueue = (model, what) =>
  post(`v1/models/${model.split("/").map(encodeURIComponent).join("/")}/${what}`);

/** The models that generate text. */
export const listModels = async () =>
  (await look("v1/models")).data.filter((model) => !model.embedding_size);
export const getJob = (jobId) => look(jobPath(jobId));
/** The job with `prefix`: why its prompt was cached or computed again. */
export const getPrefix = async (jobId) => (await look(`${jobPath(jobId)}?prefix=true`)).prefix;
export const cancelJob = (jobId) => look(jobPath(jobId), "DELETE");
export const requeueJob = (jobId) => post(`${jobPath(jobId)}/requeue`);

/** A page of a job's prompt: {text, missing, num_tokens, next}. `after`: `next` of the page before. */
export const getPrompt = (jobId, after) => look(`${jobPath(jobId)}/prompt?after=${after}`);
/** A job's answer as far as it is: {choices, num_tokens, is_cut, has_expired}. */
export const getAnswer = (jobId, limit) => look(`${jobPath(jobId)}/answer?limit=${limit}`);

/** A page of a job's log: {data, has_more, has_expired}. `after`: the last event's id, or null. */
export function listJobEvents(jobId, after, limit) {
  const query = new URLSearchParams({ limit });
  if (after !== null) query.set("after", after);
  return look(`${jobPath(jobId)}/events?${query}`);
}

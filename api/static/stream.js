/** A stream of the service, read to its end or until it breaks off. */

import { ServiceError, request } from "./service.js";
import { readEvents } from "./sse.js";

// A stream sends a keep-alive every 15 s at the latest: a longer silence is a dead connection.
const SILENCE_MS = 45_000;

/** What broke off a fetch or a body, as a ServiceError; an AbortError stays one. */
export function broken(error) {
  if (error.name === "AbortError" || error instanceof ServiceError) return error;
  const isGarbled = error instanceof SyntaxError || error instanceof RangeError;
  return isGarbled
    ? new ServiceError("The server sent an answer that cannot be read.", { isPassing: false })
    : new ServiceError("The connection was lost.");
}

/**
 * Yields {id, payload} of each event, one of the type "recovery" among them where a worker is lost and
 * where another one resumes; none where the service has nothing to send. Throws AbortError
 * when `signal` aborts, and ServiceError for a refusal and a lost connection.
 */
export async function* streamOf(path, signal, headers = {}) {
  const silence = new AbortController();
  let timer = null;
  const restartTimer = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  restartTimer();
  try {
    const response = await request(path, {
      headers: { accept: "text/event-stream", "penstock-events": "recovery", ...headers },
      signal: AbortSignal.any([signal, silence.signal]),
    });
    if (response.body === null || response.status === 204) return;
    for await (const { id, data } of readEvents(response.body, restartTimer)) {
      yield { id, payload: JSON.parse(data) };
    }
  } catch (error) {
    const isSilence = error.name === "AbortError" && !signal.aborted;
    throw isSilence ? new ServiceError("The server does not answer.") : broken(error);
  } finally {
    clearTimeout(timer);
  }
}

/**
 * The text of any job, of a chat completion for example, as the model wrote it. Its
 * events are shaped like a response's, so that an answer is made of either.
 */

import { ServiceError, getJob, jobPath, sentence } from "./service.js";
import { streamOf } from "./stream.js";

// What became of a job, as a response's status.
const STATUS = { finished: "completed", cancelled: "cancelled", failed: "failed", expired: "failed" };
const LOST = "job_lost"; // the job's record outlives its text

function endOf(job, error, id) {
  const message = job.error?.message ?? error?.message;
  return {
    type: "job.ended",
    status: error?.code === LOST ? "lost" : STATUS[job.status],
    is_cut: job.finish_reason === "length",
    num_tokens: job.usage.completion_tokens,
    message: message && job.status !== "cancelled" ? sentence(message) : null,
    sequence_number: id,
  };
}

/**
 * Yields the events of a job after the one with the id `after` (null: all), to its end. Throws as
 * `streamOf` does, and ServiceError for an error that is not the job's own end.
 */
export async function* followJob(jobId, after, signal) {
  const { model, status } = await getJob(jobId);
  yield {
    type: "job.found",
    model,
    status: status === "queued" ? "queued" : "running",
    sequence_number: after,
  };
  const headers = after === null ? {} : { "last-event-id": after };
  let last = "";
  for await (const { id, payload } of streamOf(`${jobPath(jobId)}/stream`, signal, headers)) {
    if (payload.type === "recovery") {
      yield payload;
      continue;
    }
    const { error, done, text, index = 0, token_ids: tokens } = payload;
    if (error && id === last) {
      // Without its own id it is not the job's: this frontend shuts down, or Redis is unreachable.
      const isPassing = error.code !== "stream_diverged";
      throw new ServiceError(sentence(error.message), { code: error.code, isPassing });
    }
    last = id;
    if (error || done) {
      yield endOf(await getJob(jobId), error, id);
      return;
    }
    yield {
      type: "job.delta",
      index,
      delta: text,
      num_tokens: tokens.length,
      sequence_number: id,
    };
  }
  const job = await getJob(jobId); // of which nothing was left to read
  if (job.ended_at !== null) yield endOf(job, null, after);
}

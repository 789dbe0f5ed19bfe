/** A job's state as a badge, its wait in the queue, and sentences about its lost workers. */

import { setBadge } from "./badge.js";
import { count, duration } from "./units.js";

const KINDS = {
  queued: "idle",
  running: "busy",
  finished: "good",
  failed: "bad",
  cancelled: "warn",
  expired: "warn",
};
const CAUSES = {
  worker_lost: "Worker lost",
  released: "Worker stopped",
  preempted: "Preempted by a higher lane",
  engine_died: "Engine lost",
  engine_stalled: "Engine stalled",
  device_lost: "Device lost",
  upstream_lost: "No upstream answers",
};

/** A job page's address, without the key. */
export const jobLink = (jobId) => `#job=${encodeURIComponent(jobId)}`;

export const isLive = ({ status }) => status === "queued" || status === "running";

export function setJobState(badge, job) {
  if (job.recovery) setBadge(badge, "resuming", "warn");
  else setBadge(badge, job.status, KINDS[job.status] ?? "idle");
  badge.title = reasonOf(job);
}

/** How long a job waited for a worker, or its place in the line. */
export function queueing({ queue_position: position, timings }) {
  if (position === null) return duration(timings.queue_ms);
  return position === 0 ? "next" : `#${count(position + 1)} in line`;
}

function lossOf({ cause, tokens }) {
  const place = tokens > 0 ? `after token ${count(tokens)}` : "before the first token";
  return `${CAUSES[cause] ?? "Worker lost"} ${place}`;
}

/** The sentence of a job or answer between workers: {cause, tokens}. */
export const waitingWords = (loss) => `${lossOf(loss)}, resuming`;

/** The sentence of one that another worker resumed; `worker` and `afterS` are null if unknown. */
export function resumedWords({ worker, afterS, ...loss }) {
  const on = worker ? ` on worker ${worker}` : "";
  const after = Number.isFinite(afterS) ? ` after ${Math.max(0, afterS).toFixed(1)} s` : "";
  const resumed = `esumed${on}${after}, nothing lost`;
  return loss.cause ? `${lossOf(loss)}; r${resumed}` : `R${resumed}`;
}

/** The attempts of a job that resumed an earlier one: {cause, tokens, worker, afterS}. */
export const rescuesOf = ({ attempts }) =>
  attempts.slice(1).map(({ worker, started_at: at, completion_tokens: tokens }, index) => {
    const { cause, ended_at: ended } = attempts[index];
    return { cause, tokens, worker, afterS: ended ? at - ended : null };
  });

/** Why a job ended as it did, or what its workers went through until now; "" for nothing. */
export function reasonOf(job) {
  if (job.error) return job.error.message;
  if (job.recovery) return `${waitingWords(job.recovery)}.`;
  const parts = rescuesOf(job).slice(-1).map(resumedWords);
  if (job.finish_reason) parts.unshift(`Ended: ${job.finish_reason}`);
  return parts.map((part) => `${part}.`).join(" ");
}

/** The attempts with [`from`, `to`] in Unix seconds; `now` is the end of one that runs. */
export const spansOf = (job, now) =>
  job.attempts.map((attempt, index) => {
    const from = attempt.started_at;
    const between = job.attempts[index + 1]?.started_at ?? job.recovery?.since;
    return { ...attempt, from, to: Math.max(from, attempt.ended_at ?? between ?? job.ended_at ?? now) };
  });

/** Tokens a second after the first one, without the time in which no worker had the job; or null. */
export function rateOf(job) {
  const { usage, first_token_at: first, ended_at: ended } = job;
  const gaps = usage.completion_tokens - 1;
  if (gaps < 1 || first === null || ended === null) return null;
  const spans = job.attempts.length > 0 ? spansOf(job, ended) : [{ from: first, to: ended }];
  const computedS = spans.reduce((sum, { from, to }) => sum + Math.max(0, to - Math.max(from, first)), 0);
  return computedS > 0 ? gaps / computedS : null;
}

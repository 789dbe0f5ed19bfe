/** A job's state as a badge, and its wait in the queue. */

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

/** A job page's address, without the key. */
export const jobLink = (jobId) => `#job=${encodeURIComponent(jobId)}`;

export const isLive = ({ status }) => status === "queued" || status === "running";

export function setJobState(badge, job) {
  setBadge(badge, job.status, KINDS[job.status] ?? "idle");
  badge.title = job.error?.message ?? job.finish_reason ?? "";
}

/** How long a job waited for a worker, or its place in the line. */
export function queueing({ queue_position: position, timings }) {
  if (position === null) return duration(timings.queue_ms);
  return position === 0 ? "next" : `#${count(position + 1)} in line`;
}

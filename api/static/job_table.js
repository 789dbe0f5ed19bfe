/** Jobs as /v1/jobs tells of them, with a button to cancel those that have not ended. */

import { newBadge, setBadge } from "./badge.js";
import { element } from "./element.js";
import { jobPath } from "./service.js";
import { Table, node, text } from "./table.js";
import { count, duration } from "./units.js";

const KINDS = {
  queued: "idle",
  running: "busy",
  finished: "good",
  failed: "bad",
  cancelled: "warn",
  expired: "warn",
};

function newLink(job) {
  const link = element("a", "", job.job_id);
  link.href = jobPath(job.id);
  return link;
}

function setState(badge, job) {
  setBadge(badge, job.status, KINDS[job.status] ?? "idle");
  badge.title = job.error?.message ?? job.finish_reason ?? "";
}

function queueing({ queue_position: position, timings }) {
  if (position === null) return duration(timings.queue_ms);
  return position === 0 ? "next" : `${count(position)} before`;
}

/** `onCancel(job, button)` is called when a button is pressed. */
export function jobTable(body, onCancel) {
  function newButton(job) {
    const button = element("button", "", "Cancel");
    button.type = "button";
    button.setAttribute("aria-label", `Cancel job ${job.job_id}`);
    button.addEventListener("click", () => onCancel(job, button));
    return button;
  }

  return new Table(
    body,
    [
      node(newLink, () => {}, "id"),
      node(newBadge, setState),
      text((job) => job.model),
      text((job) => count(job.usage.prompt_tokens), "number"),
      text((job) => count(job.usage.completion_tokens), "number"),
      text(queueing, "number"),
      text((job) => duration(job.timings.ttft_ms), "number"),
      text((job) => duration(job.timings.total_ms), "number"),
      node(newButton, (button, { status }) => {
        button.hidden = status !== "queued" && status !== "running";
      }),
    ],
    (job) => job.id,
  );
}

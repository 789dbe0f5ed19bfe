/** Jobs as the service lists them, with a button to cancel those that have not ended. */

import { newBadge } from "./badge.js";
import { element } from "./element.js";
import { isLive, jobLink, queueing, setJobState } from "./job_state.js";
import { Table, node, text } from "./table.js";
import { count, duration } from "./units.js";

export function newJobLink(job) {
  const link = element("a", "", job.job_id);
  link.href = jobLink(job.id);
  return link;
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
      node(newJobLink, () => {}, "id"),
      node(newBadge, setJobState),
      text((job) => job.model),
      text((job) => count(job.usage.prompt_tokens), "number"),
      text((job) => count(job.usage.completion_tokens), "number"),
      text(queueing, "number"),
      text((job) => duration(job.timings.ttft_ms), "number"),
      text((job) => duration(job.timings.total_ms), "number"),
      text((job) => count(job.attempt), "number"),
      node(newButton, (button, job) => {
        button.hidden = !isLive(job);
      }),
    ],
    (job) => job.id,
  );
}

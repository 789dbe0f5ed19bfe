/** Jobs as the service lists them: how old, how far, for whom; with a button for those that live. */

import { newBadge } from "./badge.js";
import { copyButton } from "./clipboard.js";
import { element, setText } from "./element.js";
import { isLive, jobLink, queueing, setJobState } from "./job_state.js";
import { Table, actionButton, node, text, unlabelled } from "./table.js";
import { ago, count, duration } from "./units.js";

const SHORT_CHARS = 8; // the random end of an id: its beginning is a time, alike for neighbours

/** A job's short id, which links to its page, and a button that copies the whole. */
export function newJobLink({ id, job_id: jobId }) {
  const cell = element("span", "job-id");
  const link = element("a", "", jobId.slice(-SHORT_CHARS));
  link.href = jobLink(id);
  link.title = jobId;
  const copy = copyButton(`Copy the id of job ${jobId.slice(-SHORT_CHARS)}`, () => id);
  copy.title = `Copy ${id}`;
  cell.append(link, copy);
  return cell;
}

function newTokens() {
  const cell = element("span");
  const bar = element("progress");
  bar.setAttribute("aria-label", "Tokens of the output");
  cell.append(bar, element("span"));
  return cell;
}

/** Tokens of the output; of those it may have while it runs. */
function setTokens(cell, job) {
  const [bar, label] = cell.children;
  const made = job.usage.completion_tokens;
  const most = (job.sampling?.max_tokens ?? 0) * job.num_choices;
  bar.hidden = job.status !== "running" || most === 0;
  bar.max = most || 1;
  bar.value = made;
  setText(label, bar.hidden ? count(made) : `${count(made)} / ${count(most)}`);
}

/** How long it took, or has taken until `now`, Unix seconds. */
function elapsed({ timings, started_at: startedAt, status }, now) {
  if (status === "running" && startedAt !== null) return duration(1000 * (now - startedAt));
  return duration(timings.total_ms);
}

function newCheckbox(job, selected) {
  const box = element("input");
  box.type = "checkbox";
  box.checked = selected.has(job.id);
  box.setAttribute("aria-label", `Select job ${job.job_id.slice(-SHORT_CHARS)}`);
  box.addEventListener("change", () => {
    if (box.checked) selected.add(job.id);
    else selected.delete(job.id);
    box.dispatchEvent(new CustomEvent("select-job", { bubbles: true }));
  });
  return box;
}

/**
 * `onCancel(job, button)` is called when a button is pressed. `now()`: the service's time. `selected`:
 * a set of ids, kept up to date; the body gets the event "select-job".
 */
export function jobTable(body, { onCancel, now, selected }) {
  return new Table(
    body,
    [
      unlabelled(
        node("Select", (job) => newCheckbox(job, selected), (box, job) => {
          box.hidden = !isLive(job);
          box.checked = selected.has(job.id);
        }),
      ),
      node("Job", newJobLink, () => {}, "id"),
      node("State", newBadge, setJobState),
      text("Submitted", (job) => ago(now() - job.created_at), "number"),
      text("Tenant", (job) => job.tenant),
      text("Kind", (job) => job.kind),
      text("Model", (job) => job.model),
      text("Prompt", (job) => count(job.usage.prompt_tokens), "number"),
      node("Output", newTokens, setTokens, "number"),
      text("Queued for", (job) => (job.queue_paused ? "queue paused" : queueing(job)), "number"),
      text("First token", (job) => duration(job.timings.ttft_ms), "number"),
      text("Took", (job) => elapsed(job, now()), "number"),
      unlabelled(text("Attempts", (job) => (job.attempt > 1 ? `attempt ${job.attempt}` : ""))),
      actionButton("Cancel", onCancel, (button, job) => {
        button.hidden = !isLive(job);
        setText(button, "Cancel");
        button.setAttribute("aria-label", `Cancel job ${job.job_id.slice(-SHORT_CHARS)}`);
      }),
    ],
    (job) => job.id,
  );
}

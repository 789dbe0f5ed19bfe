/** Tables of dead letters, models, batches, tenants, frontends and shared resources. */

import { newBadge, setBadge } from "./badge.js";
import { element, setText } from "./element.js";
import { newJobLink } from "./job_table.js";
import { Table, actionButton, node, text } from "./table.js";
import { bytes, count, duration, rate } from "./units.js";

const TIME = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });

/** Unix seconds as a time of the reader's clock. */
export const timeOf = (seconds) => (seconds ? TIME.format(new Date(1000 * seconds)) : "–");

/** `onRequeue(letter, button)` is called when a button is pressed. */
export const deadLetterTable = (body, onRequeue) =>
  new Table(
    body,
    [
      node("Job", newJobLink, () => {}, "id"),
      text("Reason", (letter) => letter.code),
      text("Model", (letter) => letter.model),
      text("Tenant", (letter) => letter.tenant),
      text("Crashes", (letter) => count(letter.crashes), "number"),
      text("Output", (letter) => count(letter.completion_tokens), "number"),
      text("Failed", (letter) => timeOf(letter.died_at)),
      actionButton("Run again", onRequeue, (button, { job_id: jobId }) => {
        setText(button, "Run again");
        button.setAttribute("aria-label", `Run job ${jobId} again`);
      }),
    ],
    (letter) => letter.id,
  );

function modelState({ is_served: isServed, is_paused: isPaused, queued, status, ...model }) {
  if (isPaused) return ["paused", "warn"];
  if (isServed) return ["served", "good"];
  if (model.load_failed && status !== "loading") return ["not loaded: an error", "bad"];
  const wait = `about ${duration(1000 * model.estimated_wait_s)}`;
  if (status === "loading") return [`loading, ${wait}`, "warn"];
  if (status === "on_demand") return [queued > 0 ? `on demand, ${wait}` : "on demand", "good"];
  return queued > 0 ? ["no worker", "bad"] : ["no worker", "warn"];
}

function setPause(button, { model, is_paused: isPaused, queued }) {
  button.hidden = queued === undefined; // queues are shown to operators
  const verb = isPaused ? "Resume" : "Pause";
  setText(button, verb);
  button.setAttribute("aria-label", `${verb} the queue of ${model}`);
}

/** `onOrder(model, button)` is called when a button is pressed. */
export const modelTable = (body, onOrder) =>
  new Table(
    body,
    [
      text("Model", ({ model }) => model, "id"),
      node("State", newBadge, (badge, model) => setBadge(badge, ...modelState(model))),
      text("Workers", ({ workers }) => count(workers), "number"),
      text("Running", ({ running }) => count(running), "number"),
      text("Queued", ({ queued }) => count(queued), "number"),
      text("Longest wait", ({ queue_age_s: ageS }) => duration(1000 * ageS), "number"),
      text("Tokens/s", ({ tokens_per_s: perS }) => rate(perS), "number"),
      actionButton("Pause", onOrder, setPause),
    ],
    ({ model }) => model,
  );

const BATCH_KINDS = { completed: "good", failed: "bad", expired: "warn", cancelled: "warn" };

function newProgress() {
  const cell = element("span");
  const bar = element("progress");
  bar.setAttribute("aria-label", "Rows completed");
  cell.append(bar, element("span"));
  return cell;
}

function setProgress(cell, { request_counts: { total, completed, failed } }) {
  const [bar, label] = cell.children;
  bar.max = total || 1;
  bar.value = completed + failed;
  const failures = failed > 0 ? `, ${count(failed)} failed` : "";
  setText(label, `${count(completed)} of ${count(total)}${failures}`);
}

export const batchTable = (body) =>
  new Table(
    body,
    [
      text("Batch", (batch) => batch.id, "id"),
      node("State", newBadge, (badge, { status }) =>
        setBadge(badge, status, BATCH_KINDS[status] ?? "busy"),
      ),
      node("Rows", newProgress, setProgress),
      text("Model", (batch) => batch.model ?? "–"),
      text("Endpoint", (batch) => batch.endpoint),
      text("Tenant", (batch) => batch.tenant),
      text("Created", (batch) => timeOf(batch.created_at)),
    ],
    (batch) => batch.id,
  );

/** A count, and the limit on it if there is one. */
const bounded = (value, limit) =>
  limit === null ? count(value) : `${count(value)} of ${count(limit)}`;

const limitOf = (value) => (value === null ? "none" : count(value));

/** Processor time of templates, JSON, tokenization and grammars, and its share of all tenants'. */
const cpuOf = ({ cpu_s: cpuS, cpu_share: share }) =>
  share === null ? duration(1000 * cpuS) : `${duration(1000 * cpuS)} (${Math.round(100 * share)} %)`;

export const tenantTable = (body) =>
  new Table(
    body,
    [
      text("Tenant", (tenant) => tenant.tenant, "id"),
      text("Queued", ({ queued, limits }) => bounded(queued, limits.max_queued_jobs), "number"),
      text("Running", (tenant) => count(tenant.running), "number"),
      text("CPU time", cpuOf, "number"),
      text("Held in Redis", (tenant) => bytes(tenant.held_bytes), "number"),
      text("Refused", (tenant) => count(tenant.refused), "number"),
      text("Max jobs", ({ limits }) => limitOf(limits.max_jobs), "number"),
      text(
        "Prompt tokens queued",
        ({ queued_tokens: tokens, limits }) => bounded(tokens, limits.max_queued_tokens),
        "number",
      ),
      text("Requests/min", ({ limits }) => limitOf(limits.requests_per_minute), "number"),
      text("Tokens/min", ({ limits }) => limitOf(limits.tokens_per_minute), "number"),
    ],
    (tenant) => tenant.tenant,
  );

/** Use of a resource by tenant, largest first; "" is all clients of a service without keys. */
const held = (holders) =>
  holders.map(([tenant, amount]) => `${tenant || "everyone"} ${count(amount)}`).join(", ") || "–";

export const potTable = (body) =>
  new Table(
    body,
    [
      text("Resource", (pot) => pot.pot.replaceAll("_", " "), "id"),
      text("Frontend", (pot) => pot.frontend, "id"),
      text("In use", (pot) => bounded(pot.used, pot.limit), "number"),
      text("Refused", (pot) => (pot.refused === null ? "–" : count(pot.refused)), "number"),
      text("Tenants", (pot) => held(pot.holders)),
    ],
    (pot) => pot.id,
  );

export const frontendTable = (body) =>
  new Table(
    body,
    [
      text("Frontend", (frontend) => `${frontend.host}:${frontend.port}`, "id"),
      text("Process", (frontend) => frontend.pid, "number"),
      text("Version", (frontend) => frontend.version),
      text("Started", (frontend) => timeOf(Number(frontend.started_at))),
      text("Open streams", (frontend) => count(Number(frontend.streams)), "number"),
      text("Dashboards", (frontend) => count(Number(frontend.dashboards)), "number"),
      text("Last report", (frontend) => duration(frontend.report_age_ms), "number"),
    ],
    (frontend) => frontend.id,
  );

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
export function deadLetterTable(body, onRequeue) {
  function newButton(letter) {
    const button = element("button", "", "Run again");
    button.type = "button";
    button.setAttribute("aria-label", `Run job ${letter.job_id} again`);
    button.addEventListener("click", () => onRequeue(letter, button));
    return button;
  }

  return new Table(
    body,
    [
      node(newJobLink, () => {}, "id"),
      text((letter) => letter.code),
      text((letter) => letter.model),
      text((letter) => letter.tenant),
      text((letter) => count(letter.crashes), "number"),
      text((letter) => count(letter.completion_tokens), "number"),
      text((letter) => timeOf(letter.died_at)),
      node(newButton, () => {}),
    ],
    (letter) => letter.id,
  );
}

function modelState({ is_served: isServed, is_paused: isPaused, queued }) {
  if (isPaused) return ["paused", "warn"];
  if (isServed) return ["served", "good"];
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
      text(({ model }) => model, "id"),
      node(newBadge, (badge, model) => setBadge(badge, ...modelState(model))),
      text(({ workers }) => count(workers), "number"),
      text(({ running }) => count(running), "number"),
      text(({ queued }) => count(queued), "number"),
      text(({ queue_age_s: ageS }) => duration(1000 * ageS), "number"),
      text(({ tokens_per_s: perS }) => rate(perS), "number"),
      actionButton(onOrder, setPause),
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
      text((batch) => batch.id, "id"),
      node(newBadge, (badge, { status }) => setBadge(badge, status, BATCH_KINDS[status] ?? "busy")),
      node(newProgress, setProgress),
      text((batch) => batch.model ?? "–"),
      text((batch) => batch.endpoint),
      text((batch) => batch.tenant),
      text((batch) => timeOf(batch.created_at)),
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
      text((tenant) => tenant.tenant, "id"),
      text(({ queued, limits }) => bounded(queued, limits.max_queued_jobs), "number"),
      text((tenant) => count(tenant.running), "number"),
      text(cpuOf, "number"),
      text((tenant) => bytes(tenant.held_bytes), "number"),
      text((tenant) => count(tenant.refused), "number"),
      text(({ limits }) => limitOf(limits.max_jobs), "number"),
      text(
        ({ queued_tokens: tokens, limits }) => bounded(tokens, limits.max_queued_tokens),
        "number",
      ),
      text(({ limits }) => limitOf(limits.requests_per_minute), "number"),
      text(({ limits }) => limitOf(limits.tokens_per_minute), "number"),
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
      text((pot) => pot.pot.replaceAll("_", " "), "id"),
      text((pot) => pot.frontend, "id"),
      text((pot) => bounded(pot.used, pot.limit), "number"),
      text((pot) => (pot.refused === null ? "–" : count(pot.refused)), "number"),
      text((pot) => held(pot.holders)),
    ],
    (pot) => pot.id,
  );

export const frontendTable = (body) =>
  new Table(
    body,
    [
      text((frontend) => `${frontend.host}:${frontend.port}`, "id"),
      text((frontend) => frontend.pid, "number"),
      text((frontend) => frontend.version),
      text((frontend) => timeOf(Number(frontend.started_at))),
      text((frontend) => count(Number(frontend.streams)), "number"),
      text((frontend) => count(Number(frontend.dashboards)), "number"),
      text((frontend) => duration(frontend.report_age_ms), "number"),
    ],
    (frontend) => frontend.id,
  );

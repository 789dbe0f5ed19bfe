/** The dashboard: the deployment's lists, or one job, from the service's feed. */

import { element, setText } from "./element.js";
import { Feed, rowsOf } from "./feed.js";
import { JobPage } from "./job_page.js";
import { jobLink } from "./job_state.js";
import { jobTable } from "./job_table.js";
import {
  batchTable,
  deadLetterTable,
  frontendTable,
  potTable,
  tenantTable,
} from "./operator_tables.js";
import { ServiceError, cancelJob, requeueJob } from "./service.js";
import { sparklines } from "./sparklines.js";
import { count, duration } from "./units.js";
import { workerTable } from "./worker_table.js";

const HEALTH = {
  ok: "Healthy.",
  stalled: "An engine makes no progress.",
  no_workers: "No worker is alive.",
  degraded: "Redis is unreachable: this is the last known state.",
};

const byId = (id) => document.getElementById(id);
const page = {
  status: byId("status"),
  overview: byId("overview"),
  job: byId("job"),
  jobsTitle: byId("jobs-title"),
  totals: byId("totals"),
  state: byId("state"),
  jobStatus: byId("job-status"),
  deadLetterStatus: byId("dead-letter-status"),
  search: byId("search"),
  searched: byId("searched"),
};
const tables = {
  workers: [workerTable(byId("workers")), byId("no-workers")],
  jobs: [jobTable(byId("jobs"), (job, button) => void cancel(job, button)), byId("no-jobs")],
  dead_letters: [
    deadLetterTable(byId("dead-letters"), (letter, button) => void requeue(letter, button)),
    byId("no-dead-letters"),
  ],
  batches: [batchTable(byId("batches")), byId("no-batches")],
  tenants: [tenantTable(byId("tenants")), byId("no-tenants")],
  frontends: [frontendTable(byId("frontends")), byId("no-frontends")],
  pots: [potTable(byId("pots")), byId("no-pots")],
};
const curves = sparklines(byId("history"));
const jobPage = new JobPage({
  title: byId("job-title"),
  note: byId("job-note"),
  known: byId("job-known"),
  badge: byId("job-badge"),
  reason: byId("job-reason"),
  cancel: byId("job-cancel"),
  requeue: byId("job-requeue"),
  text: byId("job-text"),
  successor: byId("job-successor"),
  timeline: byId("job-timeline"),
  attempts: byId("job-attempts"),
  noAttempts: byId("no-attempts"),
  facts: byId("job-facts"),
  prefix: byId("job-prefix"),
  prefixText: byId("job-prefix-text"),
  prefixEarlier: byId("job-prefix-earlier"),
  words: { prompt: byId("job-prompt"), answer: byId("job-answer") },
  events: { list: byId("job-events"), end: byId("job-end") },
  record: byId("job-record"),
});
const feed = new Feed(show, showTrouble);

/** The job that the page's address names, or null. */
const linkedJob = () => new URLSearchParams(location.hash.slice(1)).get("job") || null;

function setStatus(sentence, bad) {
  setText(page.status, sentence);
  page.status.classList.toggle("bad", bad);
}

function totalsOf(service) {
  return [
    ["Running", count(service.running)],
    ["Waiting", count(service.waiting)],
    ["Prompt tokens queued", count(service.queued_tokens)],
    ["Workers", count(service.workers)],
    ["Tokens per second", count(service.tokens_per_s)],
    ["Dead letters", count(service.dead_letters)],
    ["Redis round trip", duration(service.redis?.latency_ms)],
  ];
}

function showTotals(totals) {
  for (const [index, [name, value]] of totals.entries()) {
    let tile = page.totals.children[index];
    if (tile === undefined) {
      tile = element("div");
      tile.append(element("dt", "", name), element("dd"));
      page.totals.append(tile);
    }
    setText(tile.lastChild, value);
  }
}

function healthOf({ status }, workers) {
  const isComing = workers?.some((worker) => worker.status === "loading");
  if (status === "no_workers" && isComing) return "No worker serves yet: one is loading.";
  return HEALTH[status] ?? `The service is ${status}.`;
}

function show(state) {
  const { service } = state;
  setStatus(healthOf(service, rowsOf(state, "workers")), service.status !== "ok");
  if (state.job !== undefined) jobPage.show(state);
  if (linkedJob() !== null) return;
  showTotals(totalsOf(service));
  for (const [name, [table, none]] of Object.entries(tables)) {
    const rows = rowsOf(state, name);
    if (rows === null) continue; // Redis has been unreachable since the page was opened
    table.show(rows);
    none.hidden = rows.length > 0;
  }
  const slots = rowsOf(state, "history");
  if (slots !== null) curves.show(slots);
}

function showTrouble(error) {
  setStatus(error.message, true);
  if (linkedJob() !== null) jobPage.showTrouble(error);
}

async function cancel(job, button) {
  button.disabled = true;
  try {
    const { status } = await cancelJob(job.id);
    setText(page.jobStatus, `Job ${job.job_id} is ${status}.`);
    button.closest("tr").querySelector("a").focus(); // the button goes, the focus stays in its row
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    setText(page.jobStatus, error.message);
  } finally {
    button.disabled = false;
  }
}

async function requeue(letter, button) {
  button.disabled = true;
  try {
    const job = await requeueJob(letter.id);
    const link = element("a", "", job.id);
    link.href = jobLink(job.id);
    page.deadLetterStatus.replaceChildren("Run again as ", link, ".");
    link.focus();
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    setText(page.deadLetterStatus, error.message);
    button.disabled = false;
  }
}

/** Shows the lists, or the job that the address names. */
function follow() {
  const jobId = linkedJob();
  const wasJob = !page.job.hidden;
  page.job.hidden = jobId === null;
  page.overview.hidden = jobId !== null;
  document.title = jobId === null ? "Penstock dashboard" : `Job ${jobId} · Penstock`;
  if (jobId === null) {
    feed.open({ state: page.state.value });
    if (wasJob) page.jobsTitle.focus();
  } else {
    jobPage.open(jobId);
    feed.open({ job: jobId });
  }
}

page.state.addEventListener("change", follow);
page.search.addEventListener("submit", (event) => {
  event.preventDefault();
  const jobId = page.searched.value.trim();
  if (jobId === "") return;
  page.searched.value = "";
  location.hash = jobLink(jobId);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is the state of the page
  byId("main").focus();
});
window.addEventListener("hashchange", follow);
follow();

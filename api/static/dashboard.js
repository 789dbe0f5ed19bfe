/** The dashboard: asks /health and /v1/jobs every second while the page is in sight. */

import { element, setText } from "./element.js";
import { jobTable } from "./job_table.js";
import { ServiceError, cancelJob, getHealth, listJobs } from "./service.js";
import { count, duration } from "./units.js";
import { workerTable } from "./worker_table.js";

const POLL_MS = 1000;
const NUM_JOBS = 50;
const HEALTH = {
  ok: "All is well.",
  stalled: "An engine makes no steps.",
  no_workers: "No worker is alive.",
  degraded: "The job store cannot be reached: these are the last known facts.",
};

const byId = (id) => document.getElementById(id);
const page = {
  status: byId("status"),
  totals: byId("totals"),
  noWorkers: byId("no-workers"),
  noJobs: byId("no-jobs"),
  state: byId("state"),
  jobStatus: byId("job-status"),
};
const workers = workerTable(byId("workers"));
const jobs = jobTable(byId("jobs"), (job, button) => void cancel(job, button));

function setStatus(sentence, bad) {
  setText(page.status, sentence);
  page.status.classList.toggle("bad", bad);
}

async function cancel(job, button) {
  button.disabled = true;
  try {
    const { status } = await cancelJob(job.id);
    setText(page.jobStatus, `Job ${job.job_id} is ${status}.`);
    button.closest("tr").querySelector("a").focus(); // the button goes, the keyboard's place stays
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    setText(page.jobStatus, error.message);
  } finally {
    button.disabled = false;
  }
  await look();
}

function totalsOf(health) {
  const tokensPerSecond = health.workers.reduce((sum, { tok_s: rate }) => sum + (rate ?? 0), 0);
  return [
    ["Running", count(health.running)],
    ["Waiting", count(health.waiting)],
    ["Prompt tokens queued", count(health.queued_tokens)],
    ["Workers", count(health.workers.length)],
    ["Tokens per second", count(tokensPerSecond)],
    ["Redis round trip", duration(health.redis.latency_ms)],
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

async function lookAtHealth() {
  const health = await getHealth();
  if (health.workers === undefined) return health.status; // without a key; the form comes up
  showTotals(totalsOf(health));
  workers.show(health.workers);
  page.noWorkers.hidden = health.workers.length > 0;
  return health.status;
}

async function lookAtJobs() {
  const state = page.state.value;
  const found = await listJobs(state, NUM_JOBS);
  if (state !== page.state.value) return; // another look, for the state now chosen, is under way
  jobs.show(found);
  page.noJobs.hidden = found.length > 0;
}

async function look() {
  try {
    const [status] = await Promise.all([lookAtHealth(), lookAtJobs()]);
    setStatus(HEALTH[status] ?? `The service is ${status}.`, status !== "ok");
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    setStatus(error.message, true);
  }
}

/** Looks again a second after the last look ended; a page out of sight asks nothing. */
async function poll() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

page.state.addEventListener("change", () => void look());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) void look();
});

void poll();

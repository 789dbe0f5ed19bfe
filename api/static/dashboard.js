/** The dashboard: a tab of the deployment, or one job, from the service's feed. */

import { deadLettersTab } from "./dead_letters_tab.js";
import { setText } from "./element.js";
import { Feed, rowsOf } from "./feed.js";
import { JobPage } from "./job_page.js";
import { jobLink } from "./job_state.js";
import { jobsTab } from "./jobs_tab.js";
import { batchTable, potTable, tenantTable } from "./operator_tables.js";
import { overviewTab } from "./overview_tab.js";
import { Tabs, listTab, place } from "./tabs.js";
import { plural } from "./units.js";
import { modelsTab, workersTab } from "./workers_tab.js";

const HEALTH = {
  ok: "Healthy.",
  stalled: "An engine makes no progress.",
  no_workers: "No worker is alive.",
  degraded: "Redis is unreachable: this is the last known state.",
};

const byId = (id) => document.getElementById(id);
const page = {
  status: byId("status"),
  job: byId("job"),
  search: byId("search"),
  searched: byId("searched"),
};
const tabs = new Tabs(byId("tab"), byId("tabs"), {
  overview: overviewTab,
  jobs: jobsTab,
  workers: workersTab,
  models: modelsTab,
  batches: listTab({ batches: ["batches", batchTable] }),
  "dead-letters": deadLettersTab,
  tenants: listTab({ tenants: ["tenants", tenantTable], pots: ["pots", potTable] }),
});
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
let state = null; // the last one of the feed
let opened = null; // the query that it follows, as text

function setStatus(sentence, bad) {
  setText(page.status, sentence);
  page.status.classList.toggle("bad", bad);
}

function healthOf({ status, paused_queues: numPaused }, workers) {
  const isComing = workers?.some((worker) => worker.status === "loading");
  if (status === "no_workers" && isComing) return "No worker serves yet: one is loading.";
  const sentence = HEALTH[status] ?? `The service is ${status}.`;
  return numPaused > 0 ? `${sentence} ${plural(numPaused, "queue")} paused.` : sentence;
}

function show(now) {
  state = now;
  const { service } = state;
  setStatus(healthOf(service, rowsOf(state, "workers")), service.status !== "ok");
  if (state.job !== undefined) jobPage.show(state);
  else if (place().job === null) tabs.show(state);
}

function showTrouble(error) {
  setStatus(error.message, true);
  if (place().job !== null) jobPage.showTrouble(error);
}

/** Follows this query, and shows the known state at once. */
function openFeed(query) {
  const whole = query.job === undefined ? { history: "none", ...query } : query;
  const text = JSON.stringify(whole);
  const isNew = text !== opened;
  opened = text;
  if (isNew) feed.open(whole);
  if (state === null) return;
  if (!isNew) show(state);
  else if (query.job === undefined) tabs.show(state);
}

/** Shows the tab, or the job that the address names. */
function follow() {
  const at = place();
  const wasJob = !page.job.hidden;
  page.job.hidden = at.job === null;
  if (at.job === null) {
    if (wasJob) jobPage.close();
    const wasInside = byId("tab").contains(document.activeElement);
    const query = tabs.open(at);
    const name = tabs.heading.textContent;
    document.title = `${name} · Penstock dashboard`;
    openFeed(query);
    const isLost = wasInside && !byId("tab").contains(document.activeElement);
    if (wasJob || isLost) tabs.heading.focus();
  } else {
    tabs.close();
    document.title = `Job ${at.job} · Penstock`;
    jobPage.open(at.job);
    openFeed({ job: at.job });
  }
}

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

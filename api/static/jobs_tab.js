/** The tab of the jobs: filtered and paged by the address, cancelled one by one or together. */

import { actOnMany } from "./bulk.js";
import { setText } from "./element.js";
import { rowsOf } from "./feed.js";
import { jobTable } from "./job_table.js";
import { keyGiven } from "./key.js";
import { give } from "./orders.js";
import { ServiceError, cancelJob, listJobs } from "./service.js";
import { markCurrent, tabLink } from "./tabs.js";
import { count, plural } from "./units.js";

const FILTERS = ["tenant", "model", "error", "id"];
const LIVE = ["queued", "running"];
const PAGE = 50;

/** The filters of an address, without those that are empty. */
const filtersIn = (query) =>
  Object.fromEntries(["state", ...FILTERS].map((name) => [name, query.get(name) ?? ""]).filter(([, value]) => value));

export function jobsTab(root) {
  const find = (id) => root.querySelector(`#${id}`);
  const status = find("job-status");
  const form = find("job-filters");
  const states = [...find("states").children];
  const cancelSelected = find("cancel-selected");
  const cancelMatching = find("cancel-matching");
  // The tab may be left while a page is fetched.
  const [none, searchedNote] = [find("no-jobs"), find("job-searched")];
  const [older, newest] = [find("older-jobs"), find("newest-jobs")];
  const selected = new Set();
  let filters = {};
  let after = ""; // of the page that is shown; empty: the newest, which the feed keeps current
  let now = 0;
  const table = jobTable(find("jobs"), {
    onCancel: (job, button) => void cancel(job, button),
    now: () => now,
    selected,
  });

  async function cancel(job, button) {
    const order = async () => `Job ${job.job_id} is ${(await cancelJob(job.id)).status}.`;
    if (!(await give(status, button, order))) return;
    button.closest("tr").querySelector("a").focus(); // the button goes, the focus stays in its row
    if (after) void showPage();
  }

  async function cancelMany(jobs, title) {
    const words = { title, verb: "Cancel" };
    const isDone = await actOnMany("v1/jobs/cancel", jobs, words, (told) => setText(status, told));
    if (!isDone) return;
    selected.clear();
    showActions();
    if (after) void showPage();
  }

  function showActions() {
    setText(cancelSelected, `Cancel ${count(selected.size)} selected`);
    cancelSelected.hidden = selected.size === 0;
  }

  function showRows(jobs, { searched, next }) {
    table.show(jobs);
    const live = new Set(jobs.filter((job) => LIVE.includes(job.status)).map((job) => job.id));
    for (const id of selected) if (!live.has(id)) selected.delete(id);
    showActions();
    none.hidden = jobs.length > 0 || next !== null;
    const isCut = next !== null && jobs.length < PAGE;
    setText(searchedNote, isCut ? `Searched the newest ${plural(searched, "job")} only.` : "");
    older.hidden = next === null;
    older.href = tabLink("jobs", { ...filters, after: next });
    newest.hidden = !after;
    newest.href = tabLink("jobs", filters);
  }

  /** Fetches the page after `after`, unless another one was asked for meanwhile. */
  async function showPage() {
    const asked = after;
    try {
      const page = await listJobs({ ...filters, after, limit: PAGE });
      if (asked === after) showRows(page.data, page);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      setText(status, error.message);
      if (error.status !== 401) return;
      await keyGiven();
      if (asked === after) void showPage();
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = Object.fromEntries(FILTERS.map((name) => [name, form.elements[name].value.trim()]));
    location.hash = tabLink("jobs", { state: filters.state, ...given });
  });
  find("jobs").addEventListener("select-job", showActions);
  cancelSelected.addEventListener("click", () =>
    void cancelMany({ ids: [...selected] }, "Cancel the selected jobs"));
  cancelMatching.addEventListener("click", () => {
    const { error, ...filter } = filters;
    void cancelMany({ filter }, "Cancel all jobs that match");
  });

  return {
    open: (query) => {
      const before = JSON.stringify(filters);
      filters = filtersIn(query);
      if (JSON.stringify(filters) !== before) table.show([]); // of another filter
      after = query.get("after") ?? "";
      for (const name of FILTERS) form.elements[name].value = filters[name] ?? "";
      for (const link of states) link.href = tabLink("jobs", { ...filters, state: link.dataset.state });
      markCurrent(states, tabLink("jobs", filters));
      setText(status, "");
      if (after) void showPage();
      return filters;
    },
    show: (state) => {
      now = state.service.now;
      for (const link of states) {
        const number = state.service.states?.[link.dataset.state];
        setText(link.querySelector("b"), number === undefined ? "" : count(number));
      }
      // Ended jobs cannot be cancelled, and only they have an error.
      const isLive = filters.state === undefined || LIVE.includes(filters.state);
      cancelMatching.hidden = !state.service.is_operator || !isLive || filters.error !== undefined;
      const rows = rowsOf(state, "jobs");
      if (rows !== null && !after) showRows(rows, state.listed);
    },
  };
}

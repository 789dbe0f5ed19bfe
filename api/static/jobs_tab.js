/** The tab of the jobs. */

import { setText } from "./element.js";
import { jobTable } from "./job_table.js";
import { ServiceError, cancelJob } from "./service.js";
import { listTab, tabLink } from "./tabs.js";

export function jobsTab(root) {
  const status = root.querySelector("#job-status");
  const state = root.querySelector("#state");

  async function cancel(job, button) {
    button.disabled = true;
    try {
      const { status: ended } = await cancelJob(job.id);
      setText(status, `Job ${job.job_id} is ${ended}.`);
      button.closest("tr").querySelector("a").focus(); // the button goes, the focus stays in its row
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      setText(status, error.message);
    } finally {
      button.disabled = false;
    }
  }

  state.addEventListener("change", () => {
    location.hash = tabLink("jobs", { state: state.value });
  });
  const { show } = listTab({
    jobs: ["jobs", (body) => jobTable(body, (job, button) => void cancel(job, button))],
  })(root);
  return {
    open: (query) => {
      state.value = query.get("state") ?? "";
      return { state: state.value };
    },
    show,
  };
}

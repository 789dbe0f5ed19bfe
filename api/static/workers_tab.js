/** The tabs of the workers and of the models, with an operator's orders to them. */

import { setText } from "./element.js";
import { modelTable, frontendTable } from "./operator_tables.js";
import { ServiceError, drainWorker, orderQueue, resumeWorker } from "./service.js";
import { listTab } from "./tabs.js";
import { workerTable } from "./worker_table.js";

/** Calls `order` and shows `done`, or why not. */
async function give(status, button, order, done) {
  button.disabled = true;
  try {
    await order();
    setText(status, done);
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    setText(status, error.message);
  } finally {
    button.disabled = false;
  }
}

export function workersTab(root) {
  const status = root.querySelector("#worker-status");
  const onOrder = ({ id, order }, button) =>
    order === "serve"
      ? void give(status, button, () => drainWorker(id), `${id} takes no new jobs.`)
      : void give(status, button, () => resumeWorker(id), `${id} takes jobs again.`);
  return listTab({
    workers: ["workers", (body) => workerTable(body, onOrder)],
    frontends: ["frontends", frontendTable],
  })(root);
}

export function modelsTab(root) {
  const status = root.querySelector("#model-status");
  function onOrder({ model, is_paused: isPaused }, button) {
    const what = isPaused ? "resume" : "pause";
    let ignoredBy = [];
    const order = async () => ({ ignored_by: ignoredBy } = await orderQueue(model, what));
    void give(status, button, order, `The queue of ${model} is ${isPaused ? "open" : "paused"}.`).then(
      () => {
        if (ignoredBy.length === 0) return;
        const older = `of an earlier release: they take jobs all the same. Stop them.`;
        setText(status, `${status.textContent} ${ignoredBy.join(", ")}: ${older}`);
      },
    );
  }
  return listTab({ models: ["models", (body) => modelTable(body, onOrder)] })(root);
}

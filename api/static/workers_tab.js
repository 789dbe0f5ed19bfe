/** The tabs of the workers and of the models, with an operator's orders to them. */

import { rowsOf } from "./feed.js";
import { modelTable, frontendTable } from "./operator_tables.js";
import { give } from "./orders.js";
import { drainWorker, orderQueue, resumeWorker } from "./service.js";
import { listTab } from "./tabs.js";
import { workerTable } from "./worker_table.js";

export function workersTab(root) {
  const status = root.querySelector("#worker-status");
  const onOrder = ({ id, order }, button) =>
    void give(status, button, async () => {
      if (order === "serve") {
        await drainWorker(id);
        return `${id} takes no new jobs.`;
      }
      await resumeWorker(id);
      return `${id} takes jobs again.`;
    });
  const tab = listTab({
    workers: ["workers", (body) => workerTable(body, onOrder)],
    frontends: ["frontends", frontendTable],
  })(root);
  const showPartitions = partitionsPart(root);
  return {
    ...tab,
    show: (state) => {
      tab.show(state);
      void showPartitions(rowsOf(state, "partitions"));
    },
  };
}

/** Most deployments have a single one, which is not sent: the table is loaded when there are more. */
function partitionsPart(root) {
  const part = root.querySelector("#partitions-part");
  let rows = null;
  let table = null;
  return async (sent) => {
    rows = sent;
    if (rows === null) return;
    if (table === null) {
      const { partitionTable } = await import("./partition_table.js");
      table ??= partitionTable(part.querySelector("#partitions"));
    }
    part.hidden = false;
    table.show(rows);
  };
}

export function modelsTab(root) {
  const status = root.querySelector("#model-status");
  const onOrder = ({ model, is_paused: isPaused }, button) =>
    void give(status, button, async () => {
      const { ignored_by: ignoredBy } = await orderQueue(model, isPaused ? "resume" : "pause");
      const done = `The queue of ${model} is ${isPaused ? "open" : "paused"}.`;
      if (ignoredBy.length === 0) return done;
      const older = "of an earlier release: they take jobs all the same. Stop them.";
      return `${done} ${ignoredBy.join(", ")}: ${older}`;
    });
  return listTab({ models: ["models", (body) => modelTable(body, onOrder)] })(root);
}

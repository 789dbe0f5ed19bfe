/** The tab of the dead letters. */

import { actOnMany } from "./bulk.js";
import { element, setText } from "./element.js";
import { jobLink } from "./job_state.js";
import { deadLetterTable } from "./operator_tables.js";
import { give } from "./orders.js";
import { requeueJob } from "./service.js";
import { listTab } from "./tabs.js";

export function deadLettersTab(root) {
  const status = root.querySelector("#dead-letter-status");
  const all = root.querySelector("#requeue-all");
  all.addEventListener("click", () => {
    const words = { title: "Run all dead letters again", verb: "Run again" };
    const tell = (told) => setText(status, told);
    void actOnMany("v1/dead-letters/requeue", { filter: {} }, words, tell);
  });

  async function requeue(letter, button) {
    const link = element("a");
    const isDone = await give(status, button, async () => {
      const { id } = await requeueJob(letter.id);
      link.href = jobLink(id);
      link.textContent = id;
      return ["Run again as ", link, "."];
    });
    if (isDone) link.focus();
  }

  const table = (body) => deadLetterTable(body, (letter, button) => void requeue(letter, button));
  const lists = listTab({ dead_letters: ["dead-letters", table] })(root);
  return {
    open: lists.open,
    show: (state) => {
      lists.show(state);
      all.hidden = !state.service.dead_letters; // of all tenants, which operators see
    },
  };
}

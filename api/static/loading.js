/** Workers that cannot serve yet, for callers that may see the workers. */

import { element } from "./element.js";
import { look } from "./service.js";

const MAX_SHOWN = 4;

export const listLoading = async () => (await look("health")).loading ?? [];

/** How far a worker is, e.g. "Qwen3-0.6B: loading weights, 43 %". */
export function loadingSentence({ model, stage, percent }) {
  return percent > 0 ? `${model}: ${stage}, ${percent} %` : `${model}: ${stage}`;
}

/** Shows them in a list, which is hidden if it is empty. */
export function showLoading(list, workers) {
  const bySentence = new Map(workers.map((worker) => [loadingSentence(worker), worker]));
  const shown = [...bySentence].slice(0, MAX_SHOWN);
  list.hidden = shown.length === 0;
  list.replaceChildren(
    ...shown.map(([sentence, { percent }]) => {
      const item = element("li");
      const bar = element("progress");
      bar.max = 100;
      bar.value = percent;
      bar.hidden = percent === 0; // not known of many a stage
      bar.setAttribute("aria-label", sentence);
      item.append(element("span", "", sentence), bar);
      return item;
    }),
  );
}

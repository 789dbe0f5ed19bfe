/** The line of figures under an ended answer, as the service measured them. */

import { rateOf, rescuesOf } from "./job_state.js";
import { ServiceError, getJob } from "./service.js";
import { duration, plural, rate } from "./units.js";

/**
 * The times of an answer's job; those that the page measured if the service has none. The answer gets
 * the rescues that it had.
 */
export async function timingOf(answer, meter) {
  try {
    const job = await getJob(answer.id);
    const heard = answer.rescues ?? []; // the last ones of all: they have their place in the text
    answer.rescues = rescuesOf(job).map((rescue, index, all) => ({
      ...rescue,
      at: heard.at(index - all.length)?.at ?? null,
    }));
    return { ttftMs: job.timings.ttft_ms, perSecond: rateOf(job) };
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    return meter.timing;
  }
}

export function factsOf({ timing, numTokens, numReasoning }) {
  const facts = [];
  if (timing?.ttftMs != null) facts.push(`first token ${duration(timing.ttftMs)}`);
  if (numTokens > 0) facts.push(plural(numTokens, "token"));
  if (timing?.perSecond != null) facts.push(`${rate(timing.perSecond)} tokens/s`);
  if (numReasoning > 0) facts.push(`${plural(numReasoning, "token")} of reasoning`);
  return facts.join(" · ");
}

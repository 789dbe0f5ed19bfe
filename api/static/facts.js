/** The line of figures under an ended answer, as the service measured them. */

import { ServiceError, getJob } from "./service.js";
import { duration, plural, rate } from "./units.js";

/** The times of an answer's job; those that the page measured if the service has none. */
export async function timingOf(answer, meter) {
  try {
    const { timings, usage, first_token_at: first, ended_at: ended, attempt } = await getJob(answer.id);
    const gaps = usage.completion_tokens - 1;
    const perSecond = gaps > 0 && ended > first ? gaps / (ended - first) : null;
    return { ttftMs: timings.ttft_ms, perSecond, attempt };
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
  if (timing?.attempt > 1) facts.push(`resumed at attempt ${timing.attempt}`);
  return facts.join(" · ");
}

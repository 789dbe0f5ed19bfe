/** Actions on many jobs at once: counted and confirmed, then done slice by slice. */

import { confirmed } from "./dialogs.js";
import { ServiceError, post } from "./service.js";
import { count, plural } from "./units.js";

/** What became of them, e.g. "12 cancelled, 1 already ended." */
function sentenceOf(totals, stopped) {
  const parts = Object.entries(totals)
    .filter(([name, number]) => number > 0 && name !== "matched")
    .map(([name, number]) => `${count(number)} ${name.replaceAll("_", " ")}`);
  const done = parts.length > 0 ? `${parts.join(", ")}.` : "Nothing matches any more.";
  return stopped === null ? done : `${done} Not all of them: ${stopped}`;
}

/**
 * Asks, then does it. `jobs`: {ids}, of one page, or {filter}. `tell(sentence)` gets each result so
 * far. Resolves with whether it was done.
 */
export async function actOnMany(path, jobs, { title, verb }, tell) {
  const totals = {};
  try {
    let number = jobs.ids?.length;
    let hasMore = false;
    if (jobs.filter) {
      const found = await post(path, { ...jobs, dry_run: true });
      number = found.matched;
      hasMore = found.has_more;
    }
    if (number === 0 && !hasMore) {
      tell("Nothing matches.");
      return false;
    }
    const many = number === 0 ? "all jobs that match" : `${count(number)} or more jobs`;
    const what = hasMore ? many : plural(number, "job");
    if (!(await confirmed(title, `${verb} ${what}?`, `${verb} ${what}`))) return false;
    let [after, stopped] = [null, null];
    do {
      const found = await post(path, after === null ? jobs : { ...jobs, after });
      for (const [name, value] of Object.entries(found)) {
        if (typeof value === "number") totals[name] = (totals[name] ?? 0) + value;
      }
      ({ stopped, next: after } = found);
      tell(sentenceOf(totals, stopped));
    } while (after !== null && stopped === null);
    return true;
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    const isBegun = Object.keys(totals).length > 0;
    tell(isBegun ? sentenceOf(totals, error.message) : error.message);
    return isBegun;
  }
}

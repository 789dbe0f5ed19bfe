/** Links to an answer: `#job=ID` after the page's own address, which any frontend serves. */

import { isResponseId, listInputItems } from "./responses.js";
import { getJob } from "./service.js";
import { jobChat, sharedChat } from "./session.js";

const DISCLOSED =
  "Anyone who can reach this server can read the conversation up to this answer, its system prompt " +
  "and tools, and follow the answer while it runs, as long as the server keeps it (by default an " +
  "hour after its end). If the server requires keys, a key of the same tenant is " +
  "needed; the link contains none.";

export const linkOf = (id) =>
  new URL(`./#job=${encodeURIComponent(id)}`, document.baseURI).href;

export const disclosed = DISCLOSED;

/** The job, by its id or its response's, that the page's address names, or null. */
export const linkedJob = () => new URLSearchParams(location.hash.slice(1)).get("job");

/** Leaves the address without a job. */
export const clearLink = () => history.replaceState(null, "", location.pathname + location.search);

/** Why a linked answer is not shown, of the ServiceError of `linkedChat`. */
export const refusalOf = ({ status, message }) =>
  status === 404 ? "The server no longer has the linked answer." : message;

/**
 * The chat of a linked job: this browser's own, or one made from the service's data: of a response
 * all of it, of another job its text. Throws ServiceError.
 */
export async function linkedChat(chats, id) {
  const own = chats.withAnswer(id);
  if (own !== null) return own;
  if (isResponseId(id)) return sharedChat(id, await listInputItems(id));
  const job = await getJob(id); // its own id may be another one: that of a response
  return chats.withAnswer(job.id) ?? (isResponseId(job.id) ? linkedChat(chats, job.id) : jobChat(job));
}

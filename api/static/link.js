/** Links to an answer: `#job=ID` behind the page's own address, which any frontend serves. */

import { listInputItems } from "./responses.js";
import { sharedChat } from "./session.js";

const DISCLOSED =
  "Whoever can reach this server can read the conversation up to this answer, its system prompt " +
  "and tools, and see the answer go on while it runs, for as long as the server keeps it (an hour " +
  "after its end, unless set otherwise). Where the server asks for keys, one of the same tenant is " +
  "needed; the link holds none.";

export const linkOf = (responseId) =>
  new URL(`./#job=${encodeURIComponent(responseId)}`, document.baseURI).href;

export const disclosed = DISCLOSED;

/** The response that the page's address names, or null. */
export const linkedResponse = () => new URLSearchParams(location.hash.slice(1)).get("job");

/** Leaves the address without a response. */
export const clearLink = () => history.replaceState(null, "", location.pathname + location.search);

/** The chat of a linked response: this browser's own, or one made of what the service has. */
export async function linkedChat(chats, responseId) {
  return chats.withResponse(responseId) ?? sharedChat(responseId, await listInputItems(responseId));
}

/** A button's order to the service, and its result beside it. */

import { setText } from "./element.js";
import { ServiceError } from "./service.js";

/**
 * Calls `order` while the button is disabled. Shows the sentence, or the nodes, that it resolves with,
 * or why it failed. Resolves with whether it was done.
 */
export async function give(status, button, order) {
  button.disabled = true;
  try {
    status.replaceChildren(...[await order()].flat());
    return true;
  } catch (error) {
    if (!(error instanceof ServiceError)) throw error;
    setText(status, error.message);
    return false;
  } finally {
    button.disabled = false;
  }
}

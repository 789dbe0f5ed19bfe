/**
 * Loads the page again when one of its files did not arrive, as when a laptop changes networks:
 * without its scripts a page shows its first text and nothing else. This script is part of the
 * page: what cuts off the files would cut off a file of its own too.
 */
(() => {
  const FIRST_WAIT_MS = 1000;
  const MAX_WAIT_MS = 30_000;
  const MAX_RELOADS = 5; // one after the other: a file may be missing for good
  const RELOADS = "penstock.reloads";
  const store = (() => {
    try {
      return window.sessionStorage;
    } catch {
      return null; // blocked: one reload is all that can be counted
    }
  })();
  const OURS = 'script[src^="static/"], link[rel=stylesheet][href^="static/"]'; // not a proxy's
  const TROUBLE = "The page did not load completely.";

  /** Resolves after `ms`, or when the network is back. */
  const pause = (ms) =>
    new Promise((resolve) => {
      setTimeout(resolve, ms);
      addEventListener("online", resolve, { once: true });
    });

  function show(text) {
    const status = document.getElementById("status"); // null while the page is still read
    if (status) status.textContent = text;
  }

  async function reload() {
    const [{ type }] = performance.getEntriesByType("navigation");
    const uncounted = type === "reload" ? MAX_RELOADS : 0;
    const num = store ? Number(store.getItem(RELOADS)) : uncounted;
    if (num >= MAX_RELOADS) {
      await pause(0);
      return show(`${TROUBLE} A file is missing; reload the page to try again.`);
    }
    let waitMs = Math.min(FIRST_WAIT_MS * 2 ** num, MAX_WAIT_MS);
    for (;;) {
      show(`${TROUBLE} Trying again…`);
      await pause(waitMs);
      waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
      try {
        if ((await fetch(location.href, { method: "HEAD" })).ok) {
          store?.setItem(RELOADS, num + 1);
          return location.reload();
        }
      } catch {
        // The server is still out of reach.
      }
    }
  }

  let isIncomplete = false;
  const onError = ({ target }) => {
    if (isIncomplete || !target.matches?.(OURS)) return;
    isIncomplete = true;
    void reload();
  };
  addEventListener("error", onError, true); // these do not bubble
  addEventListener("load", () => isIncomplete || store?.removeItem(RELOADS));
})();

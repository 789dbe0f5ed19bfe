/**
 * Loads the page again when one of its files did not arrive, as when a laptop changes networks:
 * without its scripts a page shows its first text and nothing else. This script is part of the
 * page: what cuts off the files would cut off a file of its own too.
 */
(() => {
  const FIRST_WAIT_MS = 1000;
  const MAX_WAIT_MS = 30_000;
  const TROUBLE = "The page did not load completely. Trying again…";

  /** Resolves after `ms`, or when the network is back. */
  const pause = (ms) =>
    new Promise((resolve) => {
      setTimeout(resolve, ms);
      addEventListener("online", resolve, { once: true });
    });

  async function reload() {
    const [{ type }] = performance.getEntriesByType("navigation");
    let waitMs = type === "reload" ? MAX_WAIT_MS / 3 : FIRST_WAIT_MS; // it may have been in vain
    for (;;) {
      const status = document.getElementById("status"); // null while the page is still read
      if (status) status.textContent = TROUBLE;
      await pause(waitMs);
      waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
      try {
        if ((await fetch(location.href, { method: "HEAD" })).ok) return location.reload();
      } catch {
        // The server is still out of reach.
      }
    }
  }

  let isIncomplete = false;
  const onError = ({ target }) => {
    if (isIncomplete || !target.matches?.("script, link[rel=stylesheet]")) return;
    isIncomplete = true;
    void reload();
  };
  addEventListener("error", onError, true); // these do not bubble
})();

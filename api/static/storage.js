/**
 * The browser's storage for this page. If it is blocked or full, written values last as long as the
 * page.
 */

class Store {
  #storage = null;
  #memory = new Map(); // values that the browser did not store

  constructor(open) {
    try {
      const storage = open();
      storage?.getItem("");
      this.#storage = storage ?? null;
    } catch (error) {
      if (!(error instanceof DOMException)) throw error; // blocked
    }
  }

  /** Whether the browser lets this page keep nothing. */
  get isBlocked() {
    return this.#storage === null;
  }

  get keys() {
    return [...new Set([...Object.keys(this.#storage ?? {}), ...this.#memory.keys()])];
  }

  get(key) {
    return this.#memory.get(key) ?? this.#storage?.getItem(key) ?? null;
  }

  /** Writes for the visit at least. */
  set(key, value) {
    if (!this.keep(key, value)) this.#memory.set(key, value);
  }

  /** Writes as `set` does, but returns false, and changes nothing, where there is no room. */
  keep(key, value) {
    if (this.isBlocked) {
      this.#memory.set(key, value);
      return true;
    }
    try {
      this.#storage.setItem(key, value);
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      return false;
    }
    this.#memory.delete(key);
    return true;
  }

  remove(key) {
    this.#memory.delete(key);
    this.#storage?.removeItem(key);
  }
}

/** Shared by all tabs. */
export const browserStore = new Store(() => localStorage);
/** Only this tab's. */
export const tabStore = new Store(() => sessionStorage);

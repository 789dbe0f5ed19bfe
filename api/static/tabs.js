/**
 * The dashboard's tabs. The address names the one that is shown, `#tab=jobs&state=failed`, or a job,
 * `#job=ID`. A tab's part of the page is a template: made when it is shown, removed when it is left.
 */

import { rowsOf } from "./feed.js";

const FIRST = "overview";

/** The place that the page's address names: {job} or {tab, query}, of which `query` is the rest. */
export function place() {
  const query = new URLSearchParams(location.hash.slice(1));
  const job = query.get("job") || null;
  const tab = query.get("tab") || FIRST;
  query.delete("job");
  query.delete("tab");
  return { job, tab, query };
}

/** The address of a tab with what it shows, e.g. a filter. Values that are empty are left out. */
export function tabLink(tab, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value);
  return `#${new URLSearchParams([["tab", tab], ...given])}`;
}

/** Marks the link with this address among `links`. */
export function markCurrent(links, address) {
  for (const link of links) {
    if (link.hash === address) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** A tab of lists. `tables`: the list's name -> [id of its body, the maker of its table]. */
export const listTab = (tables) => (root) => {
  const lists = Object.entries(tables).map(([name, [id, make]]) => ({
    name,
    table: make(root.querySelector(`#${id}`)),
    none: root.querySelector(`#no-${id}`),
  }));
  return {
    open: () => ({}),
    show: (state) => {
      for (const { name, table, none } of lists) {
        const rows = rowsOf(state, name);
        const isHidden = rows === null && state.lists.workers !== undefined; // from this caller
        if (rows !== null) table.show(rows);
        else if (!isHidden) continue; // Redis has been unreachable since the page was opened
        none.hidden = rows !== null && rows.length > 0;
      }
    },
  };
};

export class Tabs {
  #root;
  #links;
  #makers;
  #shown = null; // the name of the tab
  #tab = null;

  /**
   * `makers`: a tab's name -> a function that fills the tab's part of the page and returns it:
   * `open(query)` is called with the address and returns the query of the feed, `show(state)` with
   * each state of it.
   */
  constructor(root, nav, makers) {
    this.#root = root;
    this.#links = [...nav.querySelectorAll("a")];
    this.#makers = makers;
  }

  /** Shows the tab of this place. Returns the query of its feed. */
  open({ tab, query }) {
    const name = Object.hasOwn(this.#makers, tab) ? tab : FIRST;
    if (name !== this.#shown) {
      const template = document.getElementById(`${name}-tab`);
      this.#root.replaceChildren(template.content.cloneNode(true));
      this.#shown = name;
      this.#tab = this.#makers[name](this.#root);
    }
    markCurrent(this.#links, tabLink(name));
    return this.#tab.open(query);
  }

  /** Removes the tab that is shown, while a job is. */
  close() {
    this.#root.replaceChildren();
    this.#shown = null;
    this.#tab = null;
    markCurrent(this.#links, null);
  }

  show(state) {
    this.#tab?.show(state);
  }

  /** The title of the tab that is shown. */
  get heading() {
    return this.#root.querySelector("h2");
  }
}

/**
 * A table body that follows a list. Rows and cells are kept by key from one look to the next and
 * changed only where a value changed, so focus, selection and hover survive every update.
 */

import { element, setText } from "./element.js";

export class Table {
  #body;
  #columns;
  #keyOf;
  #rows = new Map();

  /** `columns`: {heading, isUnlabelled?, className?, fill(cell, item)}. */
  constructor(body, columns, keyOf) {
    this.#body = body;
    this.#columns = columns;
    this.#keyOf = keyOf;
    const head = body.closest("table").createTHead().insertRow();
    for (const { heading, isUnlabelled, className } of columns) {
      const cell = element("th", className === "number" ? className : "");
      cell.scope = "col";
      cell.append(element("span", isUnlabelled ? "hidden" : "", heading));
      head.append(cell);
    }
  }

  show(items) {
    const focused = document.activeElement; // a row that moves loses the focus
    const rows = new Map();
    let previous = null;
    for (const item of items) {
      const key = this.#keyOf(item);
      const row = this.#rows.get(key) ?? this.#newRow();
      rows.set(key, row);
      this.#columns.forEach(({ fill }, index) => fill(row.cells[index], item));
      const after = previous === null ? this.#body.firstElementChild : previous.nextElementSibling;
      if (row !== after) this.#body.insertBefore(row, after);
      previous = row;
    }
    for (const [key, row] of this.#rows) if (!rows.has(key)) row.remove();
    this.#rows = rows;
    if (focused !== document.activeElement && this.#body.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  }

  #newRow() {
    const row = element("tr");
    for (const { heading, isUnlabelled, className } of this.#columns) {
      const cell = element("td", className);
      if (!isUnlabelled) cell.dataset.label = heading; // a phone shows it beside the cell
      row.append(cell);
    }
    return row;
  }
}

/** A column of plain text. */
export const text = (heading, read, className = "") => ({
  heading,
  className,
  fill: (cell, item) => setText(cell, read(item)),
});

/** A column whose heading is for screen readers alone. */
export const unlabelled = (column) => ({ ...column, isUnlabelled: true });

/** A column with a button. `onPress(item, button)` gets the item as it is then. */
export const actionButton = (heading, onPress, update) => ({
  heading,
  isUnlabelled: true,
  fill: (cell, item) => {
    let button = cell.firstElementChild;
    if (button === null) {
      button = element("button");
      button.type = "button";
      button.addEventListener("click", () => onPress(button.item, button));
      cell.append(button);
    }
    button.item = item;
    update(button, item);
  },
});

/** A column with its own element, made once per row, then brought up to date. */
export const node = (heading, make, update, className = "") => ({
  heading,
  className,
  fill: (cell, item) => {
    if (cell.firstElementChild === null) cell.append(make(item));
    update(cell.firstElementChild, item);
  },
});

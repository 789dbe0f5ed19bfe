/**
 * A table body that follows a list. Rows and cells are kept by key from one look to the next and
 * changed only where a value changed, so focus, selection and hover survive every update.
 */

import { element, setText } from "./element.js";

export class Table {
  #body;
  #columns;
  #keyOf;
  #labels; // of the columns; a phone shows them beside the cells
  #rows = new Map();

  /** `columns`: functions that fill a cell for an item, each with an optional `className`. */
  constructor(body, columns, keyOf) {
    this.#body = body;
    this.#columns = columns;
    this.#keyOf = keyOf;
    const heads = body.closest("table").querySelectorAll("thead th");
    this.#labels = [...heads].map((head) => (head.querySelector(".hidden") ? "" : head.textContent));
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
    for (const [index, { className }] of this.#columns.entries()) {
      const cell = element("td", className);
      if (this.#labels[index]) cell.dataset.label = this.#labels[index];
      row.append(cell);
    }
    return row;
  }
}

/** A column of plain text. */
export const text = (read, className = "") => ({
  className,
  fill: (cell, item) => setText(cell, read(item)),
});

/** A column with a button. `onPress(item, button)` gets the item as it is then. */
export const actionButton = (onPress, update) => ({
  className: "action",
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
export const node = (make, update, className = "") => ({
  className,
  fill: (cell, item) => {
    if (cell.firstElementChild === null) cell.append(make(item));
    update(cell.firstElementChild, item);
  },
});

/** Icons of buttons. They are no names: each button has a text, or a label. */

import { svg } from "./svg.js";

const PATHS = {
  send: "M4 12 20 4l-5 16-3.5-6.5zM11.5 13.5 20 4",
  stop: "M6.5 6.5h11v11h-11z",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  done: "m5 12.5 4.5 4.5L19 7.5",
  edit: "m4 20 1-4.5L16.5 4 20 7.5 8.5 19zM14 6.5l3.5 3.5",
  retry: "M19.5 12a7.5 7.5 0 1 1-2.5-5.6M17.5 2.5v4.3h-4.3",
  share: "M9.5 14.5 14.5 9.5M11 6.5l2-2a4.6 4.6 0 0 1 6.5 6.5l-2 2M13 17.5l-2 2A4.6 4.6 0 0 1 4.5 13l2-2",
  job: "M14 4h6v6M20 4l-9 9M9 5H4v15h15v-5",
  delete: "M4.5 7h15M9.5 7V4h5v3M6.5 7l1 13h9l1-13M10 11v5M14 11v5",
  settings: "M4 7h9M17 7h3M13 4.5v5M4 17h3M11 17h9M7 14.5v5",
  new: "M12 5v14M5 12h14",
  list: "M4 6h16M4 12h16M4 18h16",
  save: "M12 4v11M7.5 11 12 15.5 16.5 11M5 20h14",
};

export function icon(name) {
  const node = svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" });
  node.append(svg("path", { d: PATHS[name] }));
  return node;
}

/** Puts the icons in front of the texts of those with `data-icon`. */
export function showIcons() {
  for (const node of document.querySelectorAll("[data-icon]")) {
    node.prepend(icon(node.dataset.icon));
  }
}

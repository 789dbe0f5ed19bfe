/** Makes elements. Text goes in as text; nothing on these pages is ever parsed as markup. */

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

/** Changes a node's text only if it differs, so that a selection inside it survives. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

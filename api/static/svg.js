/** Makes elements of small pictures. Their text is in their labels. */

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  setAll(node, attributes);
  return node;
}

/** Changes attributes only where they differ. */
export function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

/** A picture whose inside is stretched to its size. */
export const picture = (className, width, height) =>
  svg("svg", {
    class: className,
    viewBox: `0 0 ${width} ${height}`,
    preserveAspectRatio: "none",
    role: "img",
  });

/** Marks in a rendered text the place of its source where another worker resumed it. */

import { element } from "./element.js";

function* textsOf(node) {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    if (!walker.currentNode.parentElement?.closest(".code-head, .formula")) yield walker.currentNode;
  }
}

/**
 * How many characters of a rendered text come from the first `at` of its source. A rendered text is
 * nearly the source without the characters of its markup: the place is right to a few characters.
 */
function renderedBefore(source, at, rendered) {
  let place = 0;
  for (let index = 0; index < at; index += 1) if (source[index] === rendered[place]) place += 1;
  return place;
}

function newMark(label) {
  const mark = element("span", "resumed");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", label);
  mark.title = label;
  return mark;
}

function putAt(fragment, place, mark) {
  let left = place;
  for (const text of textsOf(fragment)) {
    if (left <= text.length) {
      text.splitText(left).before(mark);
      return;
    }
    left -= text.length;
  }
  fragment.append(mark);
}

/** Returns the nodes of a block with its marks: {at, label}, `at` in the block's source. */
export function withMarks(nodes, source, marks) {
  const fragment = new DocumentFragment();
  fragment.append(...nodes);
  for (const { at, label } of marks) {
    const rendered = [...textsOf(fragment)].map(({ data }) => data).join("");
    putAt(fragment, renderedBefore(source, at, rendered), newMark(label));
  }
  return [...fragment.childNodes];
}

/** Makes a change that replaces a node's content by the same text; marks in it keep their places. */
export function keepMarks(node, change) {
  const marks = [...node.querySelectorAll(".resumed")].map((mark) => {
    const before = document.createRange();
    before.setStart(node, 0);
    before.setEndBefore(mark);
    return [before.toString().length, mark];
  });
  change();
  for (const [place, mark] of marks) putAt(node, place, mark);
}

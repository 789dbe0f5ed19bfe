/**
 * Formulas in Markdown: $$…$$, \[…\], \(…\) and $…$, as MathML by Temml. A formula that it refuses
 * is shown as its source.
 */

import { element } from "./element.js";
import { Renderer } from "./renderer.js";

const MAX_CHARS = 2000; // of a formula; a longer one is text
const MAX_FORMULAS = 500; // of a text; those after them are text
const MAX_PARAGRAPH_CHARS = 5000; // in which the beginning of a block is looked for
const OPTIONS = { trust: false, throwOnError: true, maxExpand: 300, maxSize: [20, 20] };
// Macros of its own can make a short formula as long as they like.
const DEFINES = /\\(?:[egx]?def|g?let|futurelet|(?:re)?newcommand|providecommand|DeclareMathOperator)/;

const DOLLARS = String.raw`\$\$(?!\$)((?:\\[^]|[^\\$]){1,${MAX_CHARS}})\$\$`;
const BRACKETS = String.raw`\\\[((?:(?!\\\])[^]){1,${MAX_CHARS}})\\\]`;
const BLOCK = new RegExp(String.raw`^ {0,3}(?:${DOLLARS}|${BRACKETS})[ \t]*(?:\n|$)`);
const DISPLAY = new RegExp(`^(?:${DOLLARS}|${BRACKETS})`);
const PARENTHESES = new RegExp(String.raw`^\\\(((?:(?!\\\))[^]){1,${MAX_CHARS}})\\\)`);
// A price or a variable of a shell is no formula: no space inside next to a dollar, no letter or
// digit after the second one.
const DOLLAR = new RegExp(String.raw`^\$(?![\s$])((?:\\[^\n]|[^\\$\n]){1,${MAX_CHARS}})(?<!\s)\$(?![\w$])`);

/** Returns a tokenizer of marked. `patterns`: each with whether its formulas stand alone. */
function tokenizer(type, patterns) {
  return function (src) {
    for (const [pattern, isDisplay] of patterns) {
      const found = pattern.exec(src);
      if (found === null) continue;
      const { lexer } = this;
      lexer.numFormulas = (lexer.numFormulas ?? 0) + 1;
      if (lexer.numFormulas > MAX_FORMULAS) return undefined;
      return { type, raw: found[0], text: found[1] ?? found[2], isDisplay };
    }
    return undefined;
  };
}

/** marked's `extensions`. */
export const FORMULAS = {
  block: [tokenizer("formulaBlock", [[BLOCK, true]])],
  startBlock: [(src) => src.slice(0, MAX_PARAGRAPH_CHARS).search(/\n {0,3}(?:\$\$|\\\[)/)],
  inline: [
    tokenizer("formula", [
      [DISPLAY, true],
      [PARENTHESES, false],
      [DOLLAR, false],
    ]),
  ],
  startInline: [(src) => src.search(/(?<![\w\\$])\$|\\[([]/)],
  childTokens: {},
  renderers: {},
};

const formulas = new Renderer(async () => (await import("./temml.min.js")).default);

function typeset(temml, text, displayMode) {
  const made = element("span");
  try {
    temml.render(text, made, { ...OPTIONS, displayMode, macros: {} });
  } catch {
    return null; // refused; for some formulas Temml fails with errors that are not its own
  }
  // Labels would name elements of the page, references would lead to them.
  for (const node of made.querySelectorAll("[id], [href]")) {
    node.removeAttribute("id");
    node.removeAttribute("href");
  }
  const fragment = new DocumentFragment();
  fragment.append(...made.childNodes);
  return fragment;
}

/** Returns the node of a token. */
export function formula({ type, raw, text, isDisplay }) {
  const node = element(type === "formulaBlock" ? "div" : "span", "formula", raw.trim());
  if (type === "formulaBlock") node.tabIndex = 0; // it scrolls sideways
  if (!DEFINES.test(text)) {
    formulas.render(node, `${isDisplay}${text}`, (temml) => typeset(temml, text, isDisplay));
  }
  return node;
}

/**
 * Markdown as nodes of the page. marked reads it; the nodes are made here, one by one, so that
 * nothing in a text can become anything but the elements below: HTML stays text, links lead to web
 * and mail addresses alone, pictures are links.
 */

import { codeBlock } from "./code_block.js";
import { element } from "./element.js";
import { unescaped } from "./entities.js";
import { FORMULAS, formula } from "./formulas.js";
import { Lexer } from "./marked.esm.js";
import { withMarks } from "./resumed_mark.js";

const OPTIONS = { gfm: true, breaks: true, extensions: FORMULAS };
// Beyond these a text is shown as it is: the work for hostile ones grows with the square.
const MAX_CHARS = 200_000;
const MAX_INLINE_CHARS = 5000; // of a paragraph, a cell, a heading
// A growing text that takes longer to show is shown as it is from then on: no harmless one does.
const MAX_SHOW_MS = 100;
const LINKS = new Set(["http:", "https:", "mailto:"]);

/** Returns marked's tokens of the blocks of a text. Throws RangeError for too deep a nesting. */
function tokensOf(text) {
  const lexer = new Lexer(OPTIONS);
  lexer.blockTokens(text.replace(/\r\n?/g, "\n"), lexer.tokens);
  for (const { src, tokens } of lexer.inlineQueue) {
    if (src.length <= MAX_INLINE_CHARS) lexer.inlineTokens(src, tokens);
    else tokens.push({ type: "escape", text: src });
  }
  return lexer.tokens;
}

/** The address of a link, or null for one that is not followed: relative, or of another kind. */
function addressOf(href) {
  const url = URL.canParse(href) ? new URL(href) : null;
  return url !== null && LINKS.has(url.protocol) ? url.href : null;
}

function link(token, content) {
  const address = addressOf(unescaped(token.href));
  if (address === null) return [document.createTextNode(token.raw)];
  const node = element("a");
  node.href = address;
  node.title = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  node.append(...content);
  return [node];
}

function table(token) {
  const row = (cells, tag) => {
    const node = element("tr");
    for (const cell of cells) {
      const made = element(tag, cell.align ? `align-${cell.align}` : "");
      made.append(...nodesOf(cell.tokens));
      node.append(made);
    }
    return node;
  };
  const head = element("thead");
  const body = element("tbody");
  head.append(row(token.header, "th"));
  body.append(...token.rows.map((cells) => row(cells, "td")));
  const made = element("table");
  made.append(head, body);
  const scroller = element("div", "table");
  scroller.tabIndex = 0;
  scroller.append(made);
  return scroller;
}

function list(token) {
  const node = element(token.ordered ? "ol" : "ul");
  if (token.ordered && Number.isInteger(token.start)) node.start = token.start;
  node.append(...token.items.map((item) => filled(item.task ? "li.task" : "li", item)));
  return node;
}

/** Returns an element, `tag.class`, with the nodes of a token's inner ones. */
function filled(name, token) {
  const [tag, className] = name.split(".");
  const node = element(tag, className);
  node.append(...nodesOf(token.tokens));
  return node;
}

const text = (content) => [document.createTextNode(content)];

const MAKERS = {
  space: () => [],
  hr: () => [element("hr")],
  br: () => [element("br")],
  paragraph: (token) => [filled("p", token)],
  // The page has headings of its own: those of an answer begin below them.
  heading: (token) => [filled(`h${Math.min(token.depth + 3, 6)}`, token)],
  blockquote: (token) => [filled("blockquote", token)],
  strong: (token) => [filled("strong", token)],
  em: (token) => [filled("em", token)],
  del: (token) => [filled("del", token)],
  code: (token) => [codeBlock(token)],
  formula: (token) => [formula(token)],
  formulaBlock: (token) => [formula(token)],
  codespan: (token) => [element("code", "", token.text)],
  table: (token) => [table(token)],
  list: (token) => [list(token)],
  checkbox: (token) => text(token.checked ? "☑ " : "☐ "),
  link: (token) => link(token, nodesOf(token.tokens)),
  image: (token) => link(token, text(`Picture: ${unescaped(token.text) || token.href}`)),
  escape: (token) => text(token.text),
  text: (token) => (token.tokens ? nodesOf(token.tokens) : text(unescaped(token.text))),
};

/** Makes the nodes of tokens; a kind that is not above, such as HTML, stays text. */
function nodesOf(tokens) {
  return tokens.flatMap((token) => (MAKERS[token.type] ?? (({ raw }) => text(raw)))(token));
}

const plain = (content) => element("p", "plain", content);

/** A node that shows a growing Markdown text; blocks that do not change keep their nodes. */
export class Markdown {
  node = element("div", "markdown");
  #shown = []; // {raw, nodes} of the blocks
  #isCostly = false;

  /** `marks`: {at, label} of places in the text; see resumed_mark.js. */
  show(content, marks = []) {
    const begun = performance.now();
    this.#show(content, marks);
    this.#isCostly ||= performance.now() - begun > MAX_SHOW_MS;
  }

  #show(content, marks) {
    const blocks = this.#marked(this.#blocks(content), marks);
    let same = 0;
    while (same < Math.min(blocks.length, this.#shown.length)) {
      if (blocks[same].raw !== this.#shown[same].raw) break;
      same += 1;
    }
    for (const { nodes } of this.#shown.splice(same)) for (const node of nodes) node.remove();
    for (const { raw, make } of blocks.slice(same)) {
      const nodes = make();
      this.#shown.push({ raw, nodes });
      this.node.append(...nodes);
    }
  }

  #marked(blocks, marks) {
    let from = 0;
    return blocks.map(({ raw, make }) => {
      const own = marks
        .map((mark) => ({ ...mark, at: mark.at - from }))
        .filter(({ at }) => at > 0 && at <= raw.length);
      from += raw.length;
      if (own.length === 0) return { raw, make };
      const key = `${raw}\0${own.map(({ at }) => at)}`;
      return { raw: key, make: () => withMarks(make(), raw, own) };
    });
  }

  #blocks(content) {
    const asIs = [{ raw: content, make: () => [plain(content)] }];
    if (this.#isCostly || content.length > MAX_CHARS) return asIs;
    try {
      return tokensOf(content).map((token) => ({
        raw: token.raw,
        make: () => {
          try {
            return nodesOf([token]);
          } catch (error) {
            if (!(error instanceof RangeError)) throw error;
            return [plain(token.raw)]; // nested deeper than the stack
          }
        },
      }));
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      return asIs;
    }
  }
}

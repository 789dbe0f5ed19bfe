/** A block of code with its language, coloured by highlight.js once it is whole. */

import { copyButton } from "./clipboard.js";
import { element } from "./element.js";
import { unescaped } from "./entities.js";
import { Renderer } from "./renderer.js";

// Other code has no colours: the work for hostile code grows with the square of its length, most
// of all in long lines.
const MAX_CHARS = 10_000;
const LONG_LINE = /[^\n]{500}/;
const CUT_MS = 1000; // a block without an end is taken for a cut one after this time without change
const CLOSED = /\n {0,3}(?:`{3,}|~{3,})[ \t]*\n*$/;

/** Collects what highlight.js finds as nodes; its own way is a string of HTML. */
class Nodes {
  fragment = new DocumentFragment();
  #path = [this.fragment];

  addText(text) {
    this.#path.at(-1).append(text);
  }

  startScope(scope) {
    const span = element("span", `hljs-${scope.split(".", 1)[0]}`);
    this.#path.at(-1).append(span);
    this.#path.push(span);
  }

  endScope() {
    if (this.#path.length > 1) this.#path.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage({ fragment }) {
    this.#path.at(-1).append(fragment);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

const colors = new Renderer(async () => {
  const { default: hljs } = await import("./highlight.min.js");
  hljs.configure({ __emitter: Nodes });
  hljs.unregisterLanguage("markdown"); // 10,000 characters of it can take 20 s
  return hljs;
});

function colored(hljs, language, text) {
  if (!hljs.getLanguage(language)) return null;
  const { fragment } = hljs.highlight(text, { language, ignoreIllegals: true })._emitter;
  return fragment.textContent === text ? fragment : null;
}

/** Returns the node of marked's token. */
export function codeBlock(token) {
  const node = element("div", "code");
  const head = element("div", "code-head");
  const language = unescaped((token.lang ?? "").split(/\s/, 1)[0]);
  head.append(element("span", "", language || "text"));
  head.append(copyButton("Copy code", () => token.text));
  const text = element("pre");
  text.tabIndex = 0; // it scrolls sideways
  const code = element("code", "", token.text);
  text.append(code);
  node.append(head, text);
  const isLong = token.text.length > MAX_CHARS || LONG_LINE.test(token.text);
  if (language === "" || isLong) return node;
  const color = () =>
    colors.render(code, `${language}\n${token.text}`, (hljs) => colored(hljs, language, token.text));
  if (CLOSED.test(token.raw)) color();
  else setTimeout(() => code.isConnected && color(), CUT_MS);
  return node;
}

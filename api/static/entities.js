/** Character references of HTML, which Markdown has too: the numeric ones and the common names. */

const NAMES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  ndash: "–",
  mdash: "—",
  hellip: "…",
  copy: "©",
  reg: "®",
  deg: "°",
  times: "×",
  euro: "€",
  larr: "←",
  rarr: "→",
  le: "≤",
  ge: "≥",
  ne: "≠",
};
const MAX_CODE_POINT = 0x10ffff;

function character(reference, hex, decimal, name) {
  if (name) return Object.hasOwn(NAMES, name) ? NAMES[name] : reference;
  const code = hex ? Number.parseInt(hex, 16) : Number.parseInt(decimal, 10);
  return code > 0 && code <= MAX_CODE_POINT ? String.fromCodePoint(code) : "\ufffd";
}

/** The text with its references replaced; names that are not above stay as they are. */
export const unescaped = (text) =>
  text.replace(/&(?:#[xX]([0-9a-fA-F]{1,6})|#([0-9]{1,7})|([a-z]{2,8}));/g, character);

"""A Lark grammar as one regular expression, where it is regular: within a JSON text only a regular
expression can be enforced."""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_PATTERN_CHARS = 8_000  # what a JSON schema's pattern may have, and some around it
MAX_DEPTH = 64

# Terminals of Lark's library.
_COMMON: Mapping[str, str] = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\f]+|(?://|#)[^\n]*)"
    r"|(?P<line>\n)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*"i?)'
    r"|(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)"
    r"|(?P<import>%import\s+common\s*\.\s*\w+|%import\s+common\s*\([\w\s,]*\))"
    r"|(?P<range>\.\.)"
    r"|(?P<alias>->\s*\w+)"
    r"|(?P<repeat>~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?)"
    r"|(?P<name>[?!]*[A-Za-z_]\w*)"
    r"|(?P<sign>[:|()\[\]?*+])"
)


class NotRegular(Exception):
    """The grammar is recursive, uses unknown names, or its expression is too long."""


def regular_expression(grammar: str) -> str | None:
    """Returns the expression that matches what the rule `start` does, as a whole; None for a
    grammar that has none here. Does not check that the grammar is valid."""
    try:
        rules = _rules(grammar)
        return _Expansion(rules).of("start")
    except NotRegular:
        return None


_Tokens = list[tuple[str, str]]


def _rules(grammar: str) -> dict[str, _Tokens]:
    """Returns the tokens of each rule's alternatives."""
    tokens = _tokens(grammar)
    rules: dict[str, _Tokens] = {}
    current: _Tokens | None = None
    for index, (kind, text) in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else ("", "")
        if kind == "name" and following == ("sign", ":"):
            name = text.lstrip("?!")
            if name in rules:
                raise NotRegular
            current = rules[name] = []
        elif kind == "import":
            for name in re.findall(r"\w+", text.split("common", 1)[1]):
                if name not in _COMMON:
                    raise NotRegular
                rules.setdefault(name, [("common", name)])
            current = None
        elif (kind, text) != ("sign", ":"):
            if current is None:
                raise NotRegular
            current.append((kind, text))
    return rules


def _tokens(grammar: str) -> _Tokens:
    tokens: _Tokens = []
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise NotRegular
        at = found.end()
        assert found.lastgroup is not None
        if found.lastgroup not in ("space", "line", "alias"):
            tokens.append((found.lastgroup, found[0]))
    return tokens


class _Expansion:
    """Replaces the names in rules by their expressions."""

    def __init__(self, rules: Mapping[str, _Tokens]) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}
        self._open: set[str] = set()

    def of(self, name: str) -> str:
        """Returns the expression of a rule. Raises NotRegular."""
        if name not in self._known:
            if name in self._open or name not in self._rules or len(self._open) > MAX_DEPTH:
                raise NotRegular
            self._open.add(name)
            tokens = list(reversed(self._rules[name]))
            self._known[name] = self._alternatives(tokens, "", 0)
            if tokens:
                raise NotRegular
            self._open.discard(name)
        return self._known[name]

    def _alternatives(self, tokens: _Tokens, closing: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise NotRegular
        alternatives, sequence = [], ""
        while tokens:
            kind, text = tokens.pop()
            if kind == "sign" and text == closing:
                break
            if kind == "sign" and text == "|":
                alternatives.append(sequence)
                sequence = ""
                continue
            sequence += self._repeated(self._atom(kind, text, tokens, depth), tokens)
            if len(sequence) > MAX_PATTERN_CHARS:
                raise NotRegular
        else:
            if closing:
                raise NotRegular
        joined = "|".join([*alternatives, sequence])
        if len(joined) > MAX_PATTERN_CHARS:
            raise NotRegular
        return f"(?:{joined})"

    def _atom(self, kind: str, text: str, tokens: _Tokens, depth: int) -> str:
        match kind, text:
            case "common", _:
                return f"(?:{_COMMON[text]})"
            case "name", _:
                return self.of(text.lstrip("?!"))
            case "regex", _:
                return _regex(text)
            case "string", _ if tokens and tokens[-1][0] == "range":
                tokens.pop()
                return _range(text, tokens.pop() if tokens else ("", ""))
            case "string", _:
                return _literal(text)
            case "sign", "(":
                return self._alternatives(tokens, ")", depth + 1)
            case "sign", "[":
                return self._alternatives(tokens, "]", depth + 1) + "?"
        raise NotRegular

    def _repeated(self, atom: str, tokens: _Tokens) -> str:
        if not tokens:
            return atom
        kind, text = tokens[-1]
        if kind == "sign" and text in "?*+":
            tokens.pop()
            return f"(?:{atom}){text}"
        if kind == "repeat":
            tokens.pop()
            least, *most = re.findall("[0-9]+", text)
            return f"(?:{atom}){{{least},{most[0] if most else least}}}"
        return atom


def _regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    body = body.replace("\\/", "/")
    kept = "".join(sorted(set(flags) - set("lu")))
    return f"(?{kept}:{body})" if kept else f"(?:{body})"


def _string(text: str) -> str:
    """Returns the text that a string of Lark's stands for."""
    body = text[1 : text.rindex('"')]
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", '"': '"', "\\": "\\"}

    def plain(found: re.Match[str]) -> str:
        escape = found[1]
        if escape[0] in "xu":
            return chr(int(escape[1:], 16))
        if escape not in escapes:
            raise NotRegular
        return escapes[escape]

    return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", plain, body)


def _literal(text: str) -> str:
    escaped = _escaped(_string(text))
    return f"(?i:{escaped})" if text.endswith("i") else escaped and f"(?:{escaped})"


def _range(first: str, last: tuple[str, str]) -> str:
    ends = (_string(first), _string(last[1])) if last[0] == "string" else ("", "")
    if any(len(end) != 1 for end in ends):
        raise NotRegular
    return f"[{_escaped(ends[0])}-{_escaped(ends[1])}]"


def _escaped(text: str) -> str:
    named = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f"}
    return "".join(
        named.get(char) or (f"\\{char}" if char in "\\.+*?()|[]{}^$#&-~/" else char)
        for char in text
    )

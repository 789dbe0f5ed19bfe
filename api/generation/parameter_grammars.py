"""Grammars of arguments that are written one by one: between tags, as in Python, or as Gemma does.

The required ones come first. A text whose length is bounded has no `<`, with which a tag begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from api.generation.grammar_writer import GrammarWriter, quoted, styled
from api.generation.parameters import (
    Parameter,
    SchemaTypes,
    branches_of,
    parameters,
    refused,
    resolved,
    values_of,
)
from api.generation.tools import Tool
from api.output_parsers.xml_calls import Markup
from shared.text.grammar import whole_pattern

_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_NO_WORD = {"type": ["string", "number", "array", "object"]}  # Python writes True and None
_NO_TEXT = {"type": ["null", "boolean", "number", "array", "object"]}
MAX_ALTERNATIVES = 4096  # of one tool's: schemas that refer to others multiply
_MAX_LENGTH = 2**16
_DEFINITIONS = ("$defs", "definitions")
# Keywords of a text that cannot be enforced if it stands without quotes.
_UNKEPT = ("format", "allOf", "not", "if")


def tagged(writer: GrammarWriter, tool: Tool, markup: Markup) -> str:
    """Returns the arguments between tags, each after the one before it.

    Raises InvalidParameter for the schema of a strict tool.
    """
    found = parameters(tool)
    frame = quoted("\n") if markup.is_framed else ""
    # A quote is in every vocabulary, alone and with what follows: it is no marker.
    behind_key = quoted if markup.has_string_attribute else writer.marker
    between = f"{behind_key(markup.key[1])} "
    if markup.value[0]:
        between += rf"/\n?/ {writer.marker(markup.value[0])} "
    ending = r"/\n?/" if not markup.is_framed else quoted("\n")

    def argument(key: str, value: str) -> str:
        return f"{writer.marker(markup.key[0])} {key} {between}{frame} {value} {ending}"

    texts = _Texts(writer, tool, markup.value[1], frame)
    if markup.has_string_attribute:
        texts.opening, texts.other_opening = quoted(' string="true">'), quoted(' string="false">')
    written = [
        f"({argument(quoted(each.name), texts.of(each.schema))}){'' if each.is_required else '?'}"
        for each in found.named
    ]
    if found.is_open:
        written.append(f"({argument(_KEY, texts.any_value())})*")
    return " ".join(written)


def pythonic(writer: GrammarWriter, tool: Tool, index: int) -> str:
    """Returns the arguments as in Python: `city="Oslo", days=2`. Raises InvalidParameter as
    `tagged`. `index` is the tool's."""

    def argument(parameter: Parameter | None) -> str:
        if parameter is None:
            return f'{_KEY} "=" ("True" | "False" | "None" | {_json(_NO_WORD, tool)})'
        if _is_boolean(parameter.schema):
            value = '("True" | "False")'
        else:
            value = f"%json {json.dumps(_within(parameter.schema, tool))}"
        return f"{quoted(parameter.name + '=')} {value}"

    return _separated(writer, tool, index, ", ", argument)


def gemma(writer: GrammarWriter, tool: Tool, index: int, quote: str) -> str:
    """Returns the arguments in braces as Gemma writes them, texts between `quote`. Raises
    InvalidParameter as `tagged`."""
    texts = _Texts(writer, tool, quote, "")
    texts.opening = writer.marker(quote)

    def argument(parameter: Parameter | None) -> str:
        if parameter is None:
            return f'{_KEY} ":" {texts.any_value()}'
        return f"{quoted(parameter.name + ':')} ({texts.of(parameter.schema)})"

    return f'"{{" {_separated(writer, tool, index, ",", argument)} "}}"'


def _separated(
    writer: GrammarWriter,
    tool: Tool,
    index: int,
    separator: str,
    argument: Callable[[Parameter | None], str],
) -> str:
    """Returns arguments with a separator between each two. Names that the schema leaves open are
    left out, unless it names none. `argument` of None is one of any name and value."""
    whole = parameters(tool)
    found = whole.named
    if whole.is_open and not found:
        return f"({argument(None)} ({quoted(separator)} {argument(None)})*)?"
    required = [argument(each) for each in found if each.is_required]
    optional = [argument(each) for each in found if not each.is_required]
    between = quoted(separator)
    if required:
        rest = " ".join(f"({between} {each})?" for each in optional)
        return f"{f' {between} '.join(required)} {rest}"
    if not optional:
        return ""
    firsts, rest = [], ""
    for number, each in reversed(list(enumerate(optional))):
        firsts.append(f"{each} {rest}")
        rest = writer.rule(f"rest_{index}_{number}", f"({between} {each})? {rest}")
    return f"({' | '.join(reversed(firsts))})?"


class _Texts:
    """Writes values that stand between two tags, each with the closing one."""

    def __init__(self, writer: GrammarWriter, tool: Tool, closing: str, frame: str) -> None:
        # Before a text, and before another value. Where a text alone has one it is in quotes: then
        # nothing ends another value.
        self.opening = self.other_opening = ""
        self._writer = writer
        self._tool = tool
        self._closing = closing
        self._frame = frame
        self._types = SchemaTypes(tool.parameters)
        self._num_left = MAX_ALTERNATIVES

    def any(self) -> str:
        """Returns any text."""
        return f"{self.opening} {self._writer.up_to(self._closing)}"

    def any_value(self) -> str:
        """Returns any text, and any other value where quotes mark a text."""
        if not self.opening:
            return self.any()
        other = self._closed(_json(_NO_TEXT, self._tool), is_text=False)
        return f"({self.any()} | {other})"

    def of(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """Returns the values of a schema, which is a part of the tool's; any text where the tool
        has too many alternatives. Raises InvalidParameter where such a tool is strict."""
        types = self._types.of(schema)
        schema = resolved(schema, self._tool.parameters)
        values = values_of(schema)
        if values is not None:
            return f"({' | '.join(map(self._literal, values))})"
        branches = branches_of(schema)
        if branches and depth < 3:
            if len(branches) > self._num_left:
                if self._tool.strict:
                    raise refused(self._tool, f"more than {MAX_ALTERNATIVES} alternatives")
                return self.any()
            self._num_left -= len(branches)
            return f"({' | '.join(self.of(branch, depth + 1) for branch in branches)})"
        if not types or (branches and "string" in types):
            return self.any()
        others = [kind for kind in types if kind != "string"]
        written = []
        if others:
            inner = {name: value for name, value in schema.items() if name not in _OF_TEXTS}
            inner = inner if len(others) == len(types) else {**inner, "type": others}
            value = f"%json {json.dumps(_within(inner, self._tool))}"
            written.append(self._closed(value, is_text=False))
        if len(others) < len(types):
            written.append(self._text(schema))
        return f"({' | '.join(written)})"

    def _text(self, schema: Mapping[str, Any]) -> str:
        for keyword in _UNKEPT:
            if self._tool.strict and keyword in schema:
                raise refused(self._tool, f"'{keyword}' of a text")
        if self._tool.strict and "pattern" in schema:
            return self._matching(schema)
        least, most = schema.get("minLength"), schema.get("maxLength")
        if not isinstance(least, int) and not isinstance(most, int):
            return self.any()
        low = min(max(least if isinstance(least, int) else 0, 0), _MAX_LENGTH)
        high = "" if not isinstance(most, int) else str(min(max(most, low), _MAX_LENGTH))
        if not self._frame:
            return self._closed(f"/[^<]{{{low},{high}}}/", is_text=True)
        # The line break is a part of the expression, which would take it otherwise.
        return f"/[^<]{{{low},{high}}}\\n/ {self._writer.marker(self._closing)}"

    def _matching(self, schema: Mapping[str, Any]) -> str:
        """Returns the texts of a strict tool's pattern. Raises InvalidParameter for one that is not
        of the whole text, and for bounds of the length beside it."""
        pattern = schema["pattern"]
        whole = whole_pattern(pattern) if isinstance(pattern, str) else None
        if whole is None or not _LENGTHS.isdisjoint(schema):
            raise refused(self._tool, "'pattern' of a text")
        is_framed = bool(self._frame)
        kept = self._writer.matching_up_to(whole, self._closing, line_break=is_framed)
        return f"{self.opening} {kept}"

    def _literal(self, value: object) -> str:
        if isinstance(value, str):
            return self._closed(quoted(value), is_text=True)
        return self._closed(quoted(json.dumps(value, ensure_ascii=False)), is_text=False)

    def _closed(self, value: str, *, is_text: bool) -> str:
        if self.opening and not self.other_opening and not is_text:
            return value
        opening = self.opening if is_text else self.other_opening
        return f"{opening} {value} {self._frame} {self._writer.marker(self._closing)}"


_LENGTHS = frozenset({"minLength", "maxLength"})
_OF_TEXTS = (*_LENGTHS, "pattern", "format")


def _json(schema: Mapping[str, Any], tool: Tool) -> str:
    return f"%json {json.dumps(styled(schema, tool))}"


def _within(schema: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """Returns the schema of one parameter as a standalone schema. Raises InvalidParameter."""
    return styled({**schema, **_referenced(schema, tool.parameters)}, tool)


def _referenced(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns those definitions of the root that a schema refers to, and they in turn. All of them
    for each parameter would be their product."""
    found: dict[str, dict[str, Any]] = {}
    pending: list[object] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        if not isinstance(value, Mapping):
            continue
        pending += value.values()
        section, _, rest = str(value.get("$ref", "")).removeprefix("#/").partition("/")
        name = rest.partition("/")[0].replace("~1", "/").replace("~0", "~")
        known = root.get(section) if section in _DEFINITIONS else None
        if isinstance(known, Mapping) and name in known and name not in found.get(section, {}):
            found.setdefault(section, {})[name] = known[name]
            pending.append(known[name])
    return found


def _is_boolean(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "boolean" and values_of(schema) is None

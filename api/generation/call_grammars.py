"""Grammars of tool calls, one for each format, for turns that must or may have calls.

`alone`: the text is calls only. Else any text may surround them, and text that starts like a call
must be one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Protocol

from api.generation.grammar_writer import GrammarWriter, arguments, quoted
from api.generation.parameter_grammars import gemma, pythonic, tagged
from api.generation.tools import Tool, ToolUse
from api.output_parsers.formats import HERMES_CLOSE, HERMES_OPEN, PYTHON_TAG
from api.output_parsers.harmony import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
)
from api.output_parsers.json_lists import (
    COHERE_CLOSE,
    COHERE_OPEN,
    GRANITE_OPEN,
    HUNYUAN_CLOSE,
    HUNYUAN_OPEN,
    NEMOTRON_CLOSE,
    NEMOTRON_OPEN,
    PHI4_OPEN,
)
from api.output_parsers.named_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_CLOSE,
    DEEPSEEK_CLOSE,
    DEEPSEEK_FENCE,
    DEEPSEEK_FENCE_CLOSE,
    DEEPSEEK_OPEN,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALL_CLOSE,
    KIMI_CLOSE,
    KIMI_OPEN,
    MISTRAL_ARGUMENTS,
    MISTRAL_ID,
    MISTRAL_OPEN,
)
from api.output_parsers.pythonic import (
    FUNCTIONGEMMA_CLOSE,
    FUNCTIONGEMMA_OPEN,
    FUNCTIONGEMMA_QUOTE,
    GEMMA4_CLOSE,
    GEMMA4_OPEN,
    GEMMA4_QUOTE,
    PYTHON_END,
    PYTHON_START,
)
from api.output_parsers.xml_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    GLM,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    Markup,
)
from shared.text.tool_formats import ToolFormat

_LINE_BREAK = '"\\n"'
# Text that begins neither a list nor a tag or a block of code, with which one may stand.
_NO_LIST = r"/([ \t\r\n]*([^\[`< \t\r\n]|<[^|]|`[^`]|``[^`]|```[^tp])(.|\n)*)?/"
# Stands for all tools where their schemas are not enforced. Its name is within a quoted text.
_ANY_TOOL = Tool(
    name="\u241e",
    description=None,
    parameters={"type": "object"},
    strict=False,
    param="tools",
    schema_param="tools",
)
_SHORT_ID = "/[a-zA-Z0-9]{9}/"  # Mistral's


class WriteCalls(Protocol):
    """Writes the rules of calls; returns the start rule."""

    def __call__(self, writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str: ...


def _hermes(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    body = f"{_LINE_BREAK} {_objects(writer, use, 'arguments')} {_LINE_BREAK} "
    rest = writer.rule("call", body + writer.marker(HERMES_CLOSE))
    if not alone:
        return writer.with_text(HERMES_OPEN, rest, is_repeated=use.parallel)
    return _several(f"{writer.marker(HERMES_OPEN)} {rest}", _LINE_BREAK, use)


def _llama3_json(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    """Returns the grammar of one call per turn, as the template has it."""
    calls = _objects(writer, use, "parameters")
    if alone:
        return calls
    tag = writer.token(PYTHON_TAG)
    other = writer.rule("OTHER", r"/([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/")
    return f"{other} | {calls}" if tag is None else f"{other} | {tag}? {calls}"


def _mistral(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    """Returns calls by name where the vocabulary has a marker for arguments, else a list."""
    if not writer.has_token(MISTRAL_ARGUMENTS):
        call_id = writer.rule("call_id", f'", \\"id\\": \\"" {_SHORT_ID} "\\""')
        body = _objects(writer, use, "arguments", f"({call_id})?")
        return _section(writer, use, MISTRAL_OPEN, rf"/ ?/ {_list(body, use)}", alone=alone)
    call_id = ""
    if writer.has_token(MISTRAL_ID):
        call_id = writer.rule("call_id", f"{writer.marker(MISTRAL_ID)} {_SHORT_ID}") + "?"
    before = f"{call_id} {writer.marker(MISTRAL_ARGUMENTS)}"
    rest = writer.rule("call", _named(writer, use, lambda tool: f"{quoted(tool.name)} {before}"))
    if not alone:
        return writer.with_text(MISTRAL_OPEN, rest, is_repeated=use.parallel)
    return _several(f"{writer.marker(MISTRAL_OPEN)} {rest}", "", use)


def _deepseek_v3(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    before = f"{writer.marker(DEEPSEEK_CALL)} {quoted('function')}"
    before += f" {writer.marker(DEEPSEEK_SEPARATOR)}"
    fence = f"\n{DEEPSEEK_FENCE}\n"
    calls = _named(writer, use, lambda tool: f"{before} {quoted(tool.name + fence)}")
    after = f"{quoted(chr(10) + DEEPSEEK_FENCE_CLOSE)} {writer.marker(DEEPSEEK_CALL_CLOSE)}"
    call = writer.rule("call", f"{calls} {after}")
    body = f"{_several(call, _LINE_BREAK, use)} {writer.marker(DEEPSEEK_CLOSE)}"
    return _section(writer, use, DEEPSEEK_OPEN, body, alone=alone)


def _deepseek_v31(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    before, behind = writer.marker(DEEPSEEK_CALL), writer.marker(DEEPSEEK_SEPARATOR)
    calls = _named(writer, use, lambda tool: f"{before} {quoted(tool.name)} {behind}")
    call = writer.rule("call", f"{calls} {writer.marker(DEEPSEEK_CALL_CLOSE)}")
    body = f"{_several(call, '', use)} {writer.marker(DEEPSEEK_CLOSE)}"
    return _section(writer, use, DEEPSEEK_OPEN, body, alone=alone)


def _kimi_k2(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    before, behind = writer.marker(KIMI_CALL), writer.marker(KIMI_ARGUMENTS)

    def head(tool: Tool) -> str:
        return f"{before} {quoted(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {behind}"

    call = writer.rule("call", f"{_named(writer, use, head)} {writer.marker(KIMI_CALL_CLOSE)}")
    body = f"{_several(call, '', use)} {writer.marker(KIMI_CLOSE)}"
    return _section(writer, use, KIMI_OPEN, body, alone=alone)


def _granite(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    opening = next((each for each in GRANITE_OPEN if writer.has_token(each)), GRANITE_OPEN[-1])
    body = _list(_objects(writer, use, "arguments"), use)
    return _section(writer, use, opening, body, alone=alone)


def _phi4_mini_json(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    body = _list(_objects(writer, use, "arguments"), use)
    return _section(writer, use, PHI4_OPEN, body, alone=alone)


def _nemotron_json(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    body = _list(_objects(writer, use, "arguments"), use)
    body = f"{body} {writer.marker(NEMOTRON_CLOSE)}"
    return _section(writer, use, NEMOTRON_OPEN, body, alone=alone)


def _hunyuan_a13b(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    body = _list(_objects(writer, use, "arguments"), use)
    body = f"{body} {writer.marker(HUNYUAN_CLOSE)}"
    return _section(writer, use, HUNYUAN_OPEN, body, alone=alone)


def _openai(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    """Returns one call, which ends the turn. Its header may be as a template writes it."""
    channel, message = writer.marker(CHANNEL), writer.marker(MESSAGE)
    kind = f'(/ ?/ {writer.marker(CONSTRAIN)} "json" | " json")'

    def head(tool: Tool) -> str:
        to = f"to={FUNCTIONS}{tool.name}"
        before = f"{channel} {quoted(f'{COMMENTARY} {to}')}"
        behind = f"{quoted(f' {to}')} {channel} {quoted(COMMENTARY)}"
        return f"({before} | {behind}) {kind} {message}"

    call = _named(writer, use, head)
    if alone:
        return call
    headers = (writer.harmony_header(name) for name in (COMMENTARY, ANALYSIS))
    before = writer.rule("preamble", " | ".join(map(writer.harmony_message, headers)))
    final = f"{writer.harmony_header(FINAL)} {writer.without(END)}"
    return f"{before}* ({call} | {final})?"


def _cohere_command3(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    def call(tool: Tool) -> str:
        name = quoted(f'", "tool_name": "{tool.name}", "parameters": ')
        return f'"{{\\"tool_call_id\\": \\"" /[0-9]{{1,3}}/ {name} {arguments(tool)} "}}"'

    body = f"{_list(_of_tools(writer, use, call), use)} {writer.marker(COHERE_CLOSE)}"
    return _section(writer, use, COHERE_OPEN, body, alone=alone)


def _glm45(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    def call(tool: Tool) -> str:
        return rf"{quoted(tool.name)} /\n?/ {tagged(writer, tool, GLM)}"

    rest = writer.rule("call", f"{_of_tools(writer, use, call)} {writer.marker(GLM.call_close)}")
    if not alone:
        return writer.with_text(GLM.opening, rest, is_repeated=use.parallel)
    return _several(f"{writer.marker(GLM.opening)} {rest}", r"/\n?/", use)


def _qwen3_coder(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    return _functions(writer, use, QWEN3_CODER, alone=alone)


def _seed_oss(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    return _functions(writer, use, SEED_OSS, alone=alone)


def _functions(writer: GrammarWriter, use: ToolUse, markup: Markup, *, alone: bool) -> str:
    """Returns calls with an opening of their own around each."""
    closing = f"{_LINE_BREAK} {writer.marker(markup.section_close)}"
    calls = _tagged_calls(writer, use, markup)
    rest = writer.rule("call", f"{_LINE_BREAK} {calls} {closing}")
    if not alone:
        return writer.with_text(markup.opening, rest, is_repeated=use.parallel)
    return _several(f"{writer.marker(markup.opening)} {rest}", _LINE_BREAK, use)


def _minimax_m2(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    return _tagged_section(writer, use, MINIMAX_M2, alone=alone)


def _deepseek_v32(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    return _tagged_section(writer, use, DEEPSEEK_V32, alone=alone)


def _deepseek_v4(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    return _tagged_section(writer, use, DEEPSEEK_V4, alone=alone)


def _deepseek_v41(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    return _tagged_section(writer, use, DEEPSEEK_V41, alone=alone)


def _tagged_section(writer: GrammarWriter, use: ToolUse, markup: Markup, *, alone: bool) -> str:
    """Returns one opening around all calls."""
    call = f"{_LINE_BREAK} {_tagged_calls(writer, use, markup)}"
    closing = f"{_LINE_BREAK} {writer.marker(markup.section_close)}"
    body = f"{_several(call, '', use)} {closing}"
    return _section(writer, use, markup.opening, body, alone=alone)


def _tagged_calls(writer: GrammarWriter, use: ToolUse, markup: Markup) -> str:
    def call(tool: Tool) -> str:
        head = f"{writer.marker(markup.name[0])} {quoted(f'{tool.name}{markup.name[1]}')}"
        closing = writer.marker(markup.call_close)
        return f"{head} {_LINE_BREAK} {tagged(writer, tool, markup)} {closing}"

    return _of_tools(writer, use, call)


def _pythonic(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    """Returns a list of calls, or text that does not begin as one does."""
    indices = {tool.name: index for index, tool in enumerate(use.callable)}

    def call(tool: Tool) -> str:
        return f'{quoted(f"{tool.name}(")} {pythonic(writer, tool, indices.get(tool.name, 0))} ")"'

    calls = _list(_of_tools(writer, use, call), use)
    if alone:
        return calls
    start, end = writer.token(PYTHON_START), writer.token(PYTHON_END)
    framed = calls if start is None else f"{start} {calls} {end or ''}"
    return f"{writer.rule('OTHER', _NO_LIST)} | {calls} | {framed}"


def _functiongemma(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    quote = FUNCTIONGEMMA_QUOTE
    return _gemma(writer, use, FUNCTIONGEMMA_OPEN, FUNCTIONGEMMA_CLOSE, quote, alone=alone)


def _gemma4(writer: GrammarWriter, use: ToolUse, *, alone: bool) -> str:
    return _gemma(writer, use, GEMMA4_OPEN, GEMMA4_CLOSE, GEMMA4_QUOTE, alone=alone)


def _gemma(
    writer: GrammarWriter, use: ToolUse, opening: str, closing: str, quote: str, *, alone: bool
) -> str:
    indices = {tool.name: index for index, tool in enumerate(use.callable)}

    def call(tool: Tool) -> str:
        return (
            f"{quoted(f'call:{tool.name}')} {gemma(writer, tool, indices.get(tool.name, 0), quote)}"
        )

    rest = writer.rule("call", f"{_of_tools(writer, use, call)} {writer.marker(closing)}")
    if not alone:
        return writer.with_text(opening, rest, is_repeated=use.parallel)
    return _several(f"{writer.marker(opening)} {rest}", "", use)


def _section(writer: GrammarWriter, use: ToolUse, opening: str, body: str, *, alone: bool) -> str:
    """Returns one section of calls, which has all those of a turn."""
    rest = writer.rule("section", body)
    if alone:
        return f"{writer.marker(opening)} {rest}"
    return writer.with_text(opening, rest, is_repeated=False)


def _list(call: str, use: ToolUse) -> str:
    return f'"[" {_several(call, quoted(", "), use)} "]"'


def _several(call: str, separator: str, use: ToolUse) -> str:
    return f"{call} ({separator} {call})*" if use.parallel else call


def _objects(writer: GrammarWriter, use: ToolUse, member: str, behind: str = "") -> str:
    """Returns the object of a call of one of the tools; `behind`: what may follow its `member`."""

    def call(tool: Tool) -> str:
        before = quoted(f'{{"name": "{tool.name}", "{member}": ')
        return f'{before} {arguments(tool)} {behind} "}}"'

    return _of_tools(writer, use, call)


def _named(writer: GrammarWriter, use: ToolUse, head: Callable[[Tool], str]) -> str:
    """Returns the head of a call of one of the tools, and its arguments as JSON after it."""
    return _of_tools(writer, use, lambda tool: f"{head(tool)} {arguments(tool)}")


def _of_tools(writer: GrammarWriter, use: ToolUse, call: Callable[[Tool], str]) -> str:
    if use.any_arguments:
        name = writer.rule("TOOL_NAME", f"/{_any_of([tool.name for tool in use.callable])}/")
        return writer.rule("tool", call(_ANY_TOOL).replace(_ANY_TOOL.name, f'" {name} "'))
    names = [writer.rule(f"tool_{i}", call(tool)) for i, tool in enumerate(use.callable)]
    return writer.rule("tool", " | ".join(names))


def _any_of(texts: Collection[str]) -> str:
    """Returns the pattern of any of these texts, with shared prefixes written once."""
    if len(texts) <= 1:
        return "".join(map(re.escape, texts))
    pairs = zip(min(texts), max(texts), strict=False)
    shared = "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[len(shared) : len(shared) + 1], []).append(text[len(shared) :])
    return f"{re.escape(shared)}({'|'.join(map(_any_of, by_first.values()))})"


CALL_GRAMMARS: Mapping[ToolFormat, WriteCalls] = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.LLAMA3_JSON: _llama3_json,
    ToolFormat.MISTRAL: _mistral,
    ToolFormat.DEEPSEEK_V3: _deepseek_v3,
    ToolFormat.DEEPSEEK_V31: _deepseek_v31,
    ToolFormat.DEEPSEEK_V32: _deepseek_v32,
    ToolFormat.DEEPSEEK_V4: _deepseek_v4,
    ToolFormat.DEEPSEEK_V41: _deepseek_v41,
    ToolFormat.KIMI_K2: _kimi_k2,
    ToolFormat.GRANITE: _granite,
    ToolFormat.PHI4_MINI_JSON: _phi4_mini_json,
    ToolFormat.HUNYUAN_A13B: _hunyuan_a13b,
    ToolFormat.NEMOTRON_JSON: _nemotron_json,
    ToolFormat.COHERE_COMMAND3: _cohere_command3,
    ToolFormat.GLM45: _glm45,
    ToolFormat.QWEN3_CODER: _qwen3_coder,
    ToolFormat.SEED_OSS: _seed_oss,
    ToolFormat.MINIMAX_M2: _minimax_m2,
    ToolFormat.PYTHONIC: _pythonic,
    ToolFormat.FUNCTIONGEMMA: _functiongemma,
    ToolFormat.GEMMA4: _gemma4,
    ToolFormat.OPENAI: _openai,
}

"""A model's text split: reasoning, text, calls; however it is cut into pieces."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.output_parsers.events import (
    OutputEvent,
    OutputParser,
    PlainParser,
    Reasoning,
    Text,
    ToolArguments,
    ToolCall,
)
from api.output_parsers.format_parser import FormatParser, merged
from api.output_parsers.formats import hermes_calls, llama3_json_calls, plain_text, reasoning_first
from api.output_parsers.reading import Reading, Source
from api.output_parsers.tool_calls import CallableTools
from tests.support.examples import examples

TOOLS = ("get_weather", "f")


def box() -> CallableTools:
    return CallableTools(TOOLS, "call_{}".format)


def hermes() -> OutputParser:
    return FormatParser(lambda source: hermes_calls(source, box()))


def llama() -> OutputParser:
    return FormatParser(lambda source: llama3_json_calls(source, box()))


def thinking(*, is_open: bool = False) -> OutputParser:
    def read(source: Source) -> Reading:
        yield from reasoning_first(source, is_open=is_open)
        yield from hermes_calls(source, box())

    return FormatParser(read)


PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": hermes,
    "llama": llama,
    "thinking": thinking,
    "opened": functools.partial(thinking, is_open=True),
    "plain": lambda: FormatParser(plain_text),
}


def read(parser: OutputParser, pieces: Iterable[str]) -> list[OutputEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    for event in events:
        (event.name if isinstance(event, ToolCall) else event.text).encode()  # as it is sent
    return merged(events)


def calls_of(events: Sequence[OutputEvent]) -> list[tuple[str, str]]:
    """(name, arguments' text) of each call."""
    texts = {event.index: event.text for event in events if isinstance(event, ToolArguments)}
    return [
        (event.name, texts.get(event.index, "")) for event in events if isinstance(event, ToolCall)
    ]


def text_of(events: Sequence[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def reasoning_of(events: Sequence[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def test_a_hermes_call_is_separated_from_the_text_before_it() -> None:
    events = read(hermes(), [f"Let me look.\n{CALL}"])
    assert events == [
        Text("Let me look."),
        ToolCall(0, "call_0", "get_weather"),
        ToolArguments(0, '{"city": "Zürich"}'),
    ]


def test_calls_are_numbered_and_white_space_between_them_is_dropped() -> None:
    second = '<tool_call>{"name":"f","arguments":{ }}</tool_call>'
    events = read(hermes(), [f"\n\n{CALL}\n{second}\n"])
    assert calls_of(events) == [("get_weather", '{"city": "Zürich"}'), ("f", "{ }")]
    assert [event.index for event in events if isinstance(event, ToolCall)] == [0, 1]
    assert text_of(events) == ""


def test_arguments_come_as_they_are_written() -> None:
    parser = hermes()
    assert parser.push('<tool_call>{"name": "f", "argum') == []
    assert not parser.has_calls
    assert parser.push('ents": {"a": [1, {"b"') == [
        ToolCall(0, "call_0", "f"),
        ToolArguments(0, '{"a": [1, {"b"'),
    ]
    assert parser.has_calls
    assert parser.push(': "}') == [ToolArguments(0, ': "}')]
    assert parser.push('"}]}, "id": 7') == [ToolArguments(0, '"}]}')]
    assert parser.push("}</tool_call>ok") == [Text("ok")]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"id": -1.5e3, "x": [true, null], "name": "\\u0066", "arguments": {}}', "{}"),
        ('{"name": "f", "arguments": {"text": "two\nlines"}}', '{"text": "two\nlines"}'),
        ('{"name": "f", "arguments": {"t": "</tool_call>"}}', '{"t": "</tool_call>"}'),
    ],
)
def test_a_call_may_be_written_in_several_ways(body: str, arguments: str) -> None:
    events = read(hermes(), [f"<tool_call>{body}</tool_call>"])
    assert calls_of(events) == [("f", arguments)]
    assert text_of(events) == ""


@pytest.mark.parametrize(
    "body",
    [
        "",
        "hello",
        "{",
        "{}",
        "[1]",
        '{"arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "nobody", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": "not json"}',
        '{"name": "f", "arguments": 5}',
        '{"name" "f"}',
        '{"name": "f\n", "arguments": {}}',
        '{"name": "f\\x"}',
        '{"name": "f", "x": 01}',
        '{"name": "f", "x": nul}',
        '{"name": "f", "x": "\\u00g0"}',
        '{"name": "f", "x": ' + "9" * 5000 + "}",
        '{"name": "f", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
    ],
)
def test_what_is_no_call_is_given_back_as_text(body: str) -> None:
    text = f" a <tool_call>{body}</tool_call> b "
    events = read(hermes(), [text])
    assert events == [Text(text)]


def test_a_call_is_found_behind_a_marker_that_none_follows() -> None:
    events = read(hermes(), [f"<tool_call> <tool_call>x{CALL}</tool_call>"])
    assert text_of(events) == "<tool_call> <tool_call>x</tool_call>"
    assert calls_of(events) == [("get_weather", '{"city": "Zürich"}')]


def test_arguments_that_break_off_being_json_are_passed_on_as_they_stand() -> None:
    events = read(hermes(), ['<tool_call>{"name": "f", "arguments": {"a": 1,,}}\n</tool_call>ok'])
    assert calls_of(events) == [("f", '{"a": 1,,}}\n')]
    assert text_of(events) == "ok"


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    events = read(hermes(), ['<tool_call>{"name": "f", "arguments": {"a": "b'])
    assert calls_of(events) == [("f", '{"a": "b')]
    events = read(hermes(), ["so <tool_ca"])
    assert events == [Text("so <tool_ca")]


def test_text_after_the_arguments_is_not_lost() -> None:
    events = read(hermes(), ['<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>'])
    assert calls_of(events) == [("f", "{}")]
    assert text_of(events) == "}\n</tool_call>"
    events = read(hermes(), ['<tool_call>{"name": "f", "arguments": {}; rest'])
    assert text_of(events) == "; rest"


def test_llamas_calls_stand_at_the_start_of_the_text() -> None:
    call = '{"name": "f", "parameters": {"a": "b"}}'
    assert calls_of(read(llama(), [call])) == [("f", '{"a": "b"}')]
    assert calls_of(read(llama(), [f" <|python_tag|>\n{call}"])) == [("f", '{"a": "b"}')]
    several = read(llama(), [f"{call}; {call}\n{call} done"])
    assert len(calls_of(several)) == 3
    assert text_of(several) == "done"
    assert read(llama(), [f"I call {call}"]) == [Text(f"I call {call}")]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "parameters": {}}',
        '{"answer": 42}',
        " \n{not json",
        "",
        "   ",
        "{",
        "<|python",
    ],
)
def test_llamas_other_json_is_text(text: str) -> None:
    assert text_of(read(llama(), [text])) == text
    assert calls_of(read(llama(), [text])) == []


def test_what_follows_a_llama_call_and_is_none_is_text() -> None:
    events = read(llama(), ['{"name": "f", "parameters": {}}; {"x": 1}; '])
    assert calls_of(events) == [("f", "{}")]
    assert text_of(events) == '; {"x": 1}; '


def test_reasoning_is_separated_from_the_answer() -> None:
    text = "<think>\nhm,\n<tool_call> maybe\n</think>\n\nAnswer.\n"
    events = read(thinking(), [text])
    assert events == [Reasoning("hm,\n<tool_call> maybe"), Text("Answer.\n")]
    opened = read(thinking(is_open=True), [text.removeprefix("<think>\n")])
    assert opened == events
    assert read(thinking(is_open=True), [text]) == events


def test_reasoning_that_is_never_closed_is_all_there_is() -> None:
    assert read(thinking(), ["<think>on and on </thin"]) == [Reasoning("on and on </thin")]
    assert read(thinking(is_open=True), ["on and on"]) == [Reasoning("on and on")]


def test_text_that_does_not_start_with_reasoning_has_no_reasoning() -> None:
    for text in ("Well <think>no</think>", "<thinking>", "<thi", " a</think>"):
        assert read(thinking(), [text]) == [Text(text)]


def test_empty_reasoning_gives_no_event_and_is_counted() -> None:
    parser = thinking()
    assert read(parser, ["<think>\n\n</think>\n\nhi"]) == [Text("hi")]
    assert parser.reasoning_bytes == len("<think>\n\n</think>")


def test_reasoning_may_be_followed_by_calls() -> None:
    events = read(thinking(), [f"<think>I should look.</think>\n{CALL}"])
    assert reasoning_of(events) == "I should look."
    assert len(calls_of(events)) == 1
    assert text_of(events) == ""


def test_the_places_of_text_are_known() -> None:
    parser = thinking()
    raw = f"<think>é</think>\nüb{CALL}\n so"
    read(parser, raw)
    assert parser.spans is not None
    shown = b"".join(
        raw.encode()[at : at + 1]
        for at in range(len(raw.encode()))
        if parser.spans.holds(at, at + 1)
    )
    assert shown.decode() == "übso"
    assert parser.spans.num_bytes == len(raw.encode())


PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", CALL, "<", "<tool",
    "\n", " ", "{", "}", "[", "]", '"', ":", ",", ";", '"name"', '"f"', '"arguments": ',
    '"parameters": ', '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}',
    "\\", "\\u00e9", "text", "é", "😀", "1", "-", "2.5e", "true", "nul", "null",
    '{"name": "f", "arguments": {"b": [',
]  # fmt: skip


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(st.sampled_from(PARTS), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.promise("Runtime: stop strings with hold-back, logprobs, several choices, tool calls")
@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=examples(100), deadline=None)
@given(cut=cut_texts())
def test_cutting_the_text_differently_changes_nothing(
    name: str, cut: tuple[str, list[str]]
) -> None:
    text, pieces = cut
    new = PARSERS[name]
    in_one, in_pieces, in_characters = new(), new(), new()
    whole = read(in_one, [text])
    assert read(in_pieces, pieces) == whole
    assert read(in_characters, text) == whole
    parsers = (in_one, in_pieces, in_characters)
    assert len({(p.has_calls, p.reasoning_bytes) for p in parsers}) == 1
    for parser in parsers:
        assert parser.spans is not None
        assert parser.spans.num_bytes == len(text.encode())


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=examples(60), deadline=None)
@given(cut=cut_texts())
def test_what_is_not_part_of_a_call_is_not_lost(name: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    parser = PARSERS[name]()
    events = read(parser, pieces)
    shown = _solid("".join(e.text for e in events if isinstance(e, Text | Reasoning)))
    if parser.has_calls:
        rest = iter(text)
        assert all(char in rest for char in shown)  # in order
    else:
        assert shown == _solid(text)


def _solid(text: str) -> str:
    """Without what formats may leave out: white space, the markers of reasoning, the tag."""
    for marker in ("<think>", "</think>", "<|python_tag|>"):
        text = text.replace(marker, "")
    return "".join(text.split())


@settings(max_examples=examples(60), deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    ),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    step=st.integers(1, 7),
)
def test_arguments_are_the_exact_text(
    arguments: dict[str, object], indent: int | None, ascii_only: bool, step: int
) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    bare = f'{{"name": "f", "arguments": {written}}}'
    for new, text in ((hermes, f"<tool_call>\n{bare}\n</tool_call>"), (llama, bare)):
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        assert calls_of(read(new(), pieces)) == [("f", written)]


def test_a_long_text_of_markers_takes_no_long_time() -> None:
    parser = hermes()
    for _ in range(20_000):
        parser.push('<tool_call>{"x":["')
    parser.push("\n" * 20_000)
    assert text_of(merged(parser.finish())).count("<tool_call>") > 0


class Counted(str):
    """A text that counts the characters that adding to it copies."""

    copied = 0

    def __add__(self, other: str) -> Counted:
        Counted.copied += len(self) + len(other)
        return Counted(super().__add__(other))


def test_pieces_are_joined_at_once() -> None:
    pieces = [Counted("ab")] * 1000
    events: list[OutputEvent] = [
        *map(Text, pieces),
        *map(Reasoning, pieces),
        *(ToolArguments(index, piece) for index in (0, 1) for piece in pieces),
    ]
    Counted.copied = 0
    whole = "ab" * 1000
    joined = [Text(whole), Reasoning(whole), ToolArguments(0, whole), ToolArguments(1, whole)]
    assert merged(events) == joined
    assert Counted.copied == 0


def test_the_plain_parser_passes_everything_on() -> None:
    parser = PlainParser()
    assert read(parser, ["a", "", "<think>"]) == [Text("a<think>")]

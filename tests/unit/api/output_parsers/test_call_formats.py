"""Calls in the formats of many families: texts as their models write them, cut at every place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.output_parsers import literals, reading
from api.output_parsers.events import (
    OutputEvent,
    OutputParser,
    PlainParser,
    Reasoning,
    Text,
    ToolArguments,
    ToolCall,
)
from api.output_parsers.format_parser import SLICE_CHARS, FormatParser, family_of, merged
from api.output_parsers.formats import reasoning_first
from api.output_parsers.parser import OutputParserFactory, ParserConfig, Thinking
from api.output_parsers.reading import Reading, Source
from api.output_parsers.tool_calls import CallableTools
from shared.text.tool_formats import UNTYPED_FORMATS, ReasoningFormat, ToolFormat, markers
from tests.support.examples import examples
from tests.unit.api.output_parsers.recorded_texts import (
    DSML_FORMS,
    END,
    KIMI_BEGIN,
    KIMI_END,
    LIST,
    NAMES,
    OBJECT,
    OSLO,
    RECORDED,
    TEXTS,
    TYPES,
    ZURICH,
    C,
    D,
    M,
    Recorded,
)

# The values are bare text: what one is depends on all of it.
BY_TYPE = UNTYPED_FORMATS - {ToolFormat.PYTHONIC} | {form for form, _, _ in DSML_FORMS}


def test_every_format_has_a_recorded_text() -> None:
    with_calls = {recorded.form for recorded in RECORDED if recorded.calls}
    assert with_calls == set(ToolFormat) - {ToolFormat.TEXT}
    with_thoughts = {recorded.reasoning for recorded in RECORDED if recorded.thoughts}
    assert with_thoughts >= set(ReasoningFormat)


def parser(recorded: Recorded) -> OutputParser:
    config = ParserConfig(
        tool_format=recorded.form,
        names=NAMES,
        types=TYPES,
        reasoning_format=recorded.reasoning,
        thinking=recorded.thinking,
    )
    return OutputParserFactory(config, "seed")()


def read(to: OutputParser, pieces: Iterable[str]) -> list[OutputEvent]:
    events = [event for piece in pieces for event in to.push(piece)]
    events += to.finish()
    for event in events:
        (event.name if isinstance(event, ToolCall) else event.text).encode()  # as it is sent
    return merged(events)


def calls_of(events: Iterable[OutputEvent]) -> tuple[tuple[str, str], ...]:
    """(name, arguments' text) of each call."""
    found: dict[int, tuple[str, str]] = {}
    for event in events:
        if isinstance(event, ToolCall):
            found[event.index] = (event.name, "")
        elif isinstance(event, ToolArguments):
            name, text = found[event.index]
            found[event.index] = (name, text + event.text)
    return tuple(found.values())


def joined(events: Iterable[OutputEvent], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.text[:40])
def test_a_recorded_text_is_read_alike_wherever_it_is_cut(recorded: Recorded) -> None:
    text = recorded.text
    whole = read(parser(recorded), [text])
    assert calls_of(whole) == recorded.calls
    assert joined(whole, Text) == recorded.content
    assert joined(whole, Reasoning) == recorded.thoughts
    for at in range(len(text) + 1):
        assert read(parser(recorded), [text[:at], text[at:]]) == whole, at
    in_characters = parser(recorded)
    assert read(in_characters, text) == whole
    assert in_characters.has_calls is bool(recorded.calls)
    assert in_characters.spans is not None
    assert in_characters.spans.num_bytes == len(text.encode())


IN_STRINGS = {
    ToolFormat.HERMES: "<tool_call>%s</tool_call>",
    ToolFormat.LLAMA3_JSON: "%s",
    ToolFormat.GRANITE: "<|tool_call|>[%s]",
    ToolFormat.COHERE_COMMAND3: "<|START_ACTION|>[%s]<|END_ACTION|>",
}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolFormat.PYTHONIC, r'[get_weather(city="\ud800", days="a\ud800b")]'),
        (ToolFormat.PYTHONIC, r'[get_weather(days="\ud800", city="\udc00")]'),
        (ToolFormat.GEMMA4, r'<|tool_call>call:get_weather{city:"\ud800"}<tool_call|>'),
        *(
            (form, frame % r'{"name": "get_weather", "arguments": "{\"city\": \"\ud800\"}"}')
            for form, frame in IN_STRINGS.items()
        ),
    ],
)
def test_half_a_surrogate_pair_in_arguments_is_sent_as_an_escape(
    form: ToolFormat, text: str
) -> None:
    for pieces in ([text], list(text)):
        ((_, arguments),) = calls_of(read(parser(Recorded(form, text)), pieces))
        assert r"\ud800" in arguments
        assert "\ud800" in "".join(json.loads(arguments).values())


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.text[:40])
def test_a_recorded_text_may_break_off_anywhere(recorded: Recorded) -> None:
    """What there is of a call is a beginning of it."""
    for at in range(len(recorded.text)):
        calls = calls_of(read(parser(recorded), [recorded.text[:at]]))
        assert [name for name, _ in calls] == [name for name, _ in recorded.calls[: len(calls)]]
        if recorded.form in BY_TYPE:  # a word that breaks off may be a text
            assert calls[:-1] == recorded.calls[: max(0, len(calls) - 1)]
            continue
        for (_, arguments), (_, whole) in zip(calls, recorded.calls, strict=False):
            assert whole.startswith(arguments)


@pytest.mark.parametrize(("form", "text"), TEXTS, ids=[text[:40] for _, text in TEXTS])
def test_what_is_no_call_is_text_wherever_it_is_cut(form: ToolFormat, text: str) -> None:
    recorded = Recorded(form, text)
    for at in range(len(text) + 1):
        assert read(parser(recorded), [text[:at], text[at:]]) == [Text(text)], at
    assert read(parser(recorded), text) == [Text(text)]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.text[:40])
def test_arguments_are_streamed_after_the_name(recorded: Recorded) -> None:
    """A call is announced before its last argument is there, and its arguments are not gathered."""
    if ("get_weather", OSLO) not in recorded.calls:
        return
    to, begin = parser(recorded), recorded.text.rindex("Oslo")
    before = [event for char in recorded.text[:begin] for event in to.push(char)]
    assert any(isinstance(event, ToolCall) for event in before)
    after = [event for char in "Os" for event in to.push(char)]
    shown = "".join(e.text for e in after if isinstance(e, ToolArguments))
    assert shown.removeprefix('"') == "Os"


PIECES = [
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>"),
    *(D, "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("function", "```json", "```", KIMI_BEGIN, KIMI_END, "<|tool_call_begin|>", "functions."),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call|>", "<tool_call>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<TOOLCALL>", "</TOOLCALL>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    *("</tool_call>", "functools", "<tool_calls>", "</tool_calls>", "now", "get_weather", ":0"),
    *("{}", OSLO, "[", "]", ",", "{", "}", '"', " ", "\n", "é", "text", "<", "Here is my"),
    *(C, M, END, "<|start|>", "assistant", "to=functions.now", "<|constrain|>", "<|call|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", "</function>"),
    *("<parameter=city>", "<parameter=days>", "</parameter>", "<minimax:tool_call>", ">", '">'),
    *("</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', "city", "days"),
    *("<start_function_call>", "<end_function_call>", "<escape>", "call:", "<|tool_call>"),
    *("(", ")", "<tool_call|>", '<|"|>', "city=", "'", "'''", "None", "2."),
    *("```", "<|python_start|>", "="),
    *("<response>", "</response>", "<answer>", "</answer>"),
    *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="', '<｜DSML｜parameter name="'),
    *("</｜DSML｜parameter>", "</｜DSML｜invoke>", ' string="true">', ' string="false">'),
    *("final", "analysis", "commentary", " thought process:", " response:", LIST, "\\"),
    *("<|python_tag|>", ZURICH, '"arguments": ', '"parameters": ', "<tool"),
    *('{"name": "now", "arguments": {"b": [', '{"name": "now", "parameters": {}}'),
    *(":", ";", "]", '"name"', "😀", "1", "-", "2.5e", "true", "nul", "null", "\\u00e9"),
    *(OBJECT.format(OSLO), '"name": "now"', r"\ud800", "days=", '"{\\"city\\": \\"', '\\"}"'),
]  # fmt: skip


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in itertools.pairwise(bounds)]


REASONING = {
    ToolFormat.MISTRAL: ReasoningFormat.MISTRAL,
    ToolFormat.GRANITE: ReasoningFormat.GRANITE33,
    ToolFormat.HUNYUAN_A13B: ReasoningFormat.HUNYUAN_A13B,
    ToolFormat.GEMMA4: ReasoningFormat.GEMMA4,
    ToolFormat.COHERE_COMMAND3: ReasoningFormat.COHERE_COMMAND3,
    ToolFormat.OPENAI: ReasoningFormat.OPENAI,
}


@pytest.mark.promise("Runtime: stop strings with hold-back, logprobs, several choices, tool calls")
@pytest.mark.parametrize("form", ToolFormat)
@settings(max_examples=examples(60), deadline=None)
@given(cut=cut_texts(), thinking=st.sampled_from(Thinking))
def test_any_text_is_read_alike_however_it_is_cut(
    form: ToolFormat, cut: tuple[str, list[str]], thinking: Thinking
) -> None:
    text, pieces = cut
    reasoning = None if thinking is Thinking.NO else REASONING.get(form, ReasoningFormat.THINK)
    recorded = Recorded(form, text, reasoning=reasoning, thinking=thinking)
    parsers = [parser(recorded) for _ in range(3)]
    whole = read(parsers[0], [text])
    assert read(parsers[1], pieces) == whole
    assert read(parsers[2], text) == whole
    assert len({(each.has_calls, each.reasoning_bytes) for each in parsers}) == 1
    for each in parsers:
        assert each.spans is not None
        assert each.spans.num_bytes == len(text.encode())


@pytest.mark.parametrize("form", ToolFormat)
@settings(max_examples=examples(60), deadline=None)
@given(cut=cut_texts(), thinking=st.sampled_from(Thinking))
def test_nothing_is_lost_of_a_text_without_calls(
    form: ToolFormat, cut: tuple[str, list[str]], thinking: Thinking
) -> None:
    text, pieces = cut
    reasoning = None if thinking is Thinking.NO else REASONING.get(form, ReasoningFormat.THINK)
    to = parser(Recorded(form, text, reasoning=reasoning, thinking=thinking))
    events = read(to, pieces)
    shown = "".join(event.text for event in events if isinstance(event, Text | Reasoning))
    if not to.has_calls and form is not ToolFormat.OPENAI:
        tag = "<|python_tag|>" if form is ToolFormat.LLAMA3_JSON else ""
        left_out = (tag, *markers(ToolFormat.TEXT, reasoning))
        assert solid(shown, *left_out) == solid(text, *left_out)
        assert reasoning or shown == text.removeprefix(tag)
        return
    rest = iter(text)
    shown = solid(shown) if form is ToolFormat.OPENAI else shown  # it adds lines between messages
    assert all(char in rest for char in shown)  # in order


def solid(text: str, *left_out: str) -> str:
    """Returns it without space and what else may be left out."""
    for marker in left_out:
        text = text.replace(marker, "")
    return "".join(text.split())


HEAD_CHARS = 2048
LONG_CHARS = 2**15


@pytest.mark.parametrize("form", [form for form in ToolFormat if form is not ToolFormat.TEXT])
@pytest.mark.parametrize("held", ["", '{"x": "', "now"])
def test_little_is_held_back_of_a_long_text_of_markers(
    form: ToolFormat, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held back is read and copied again: without a bound, once for each of its parts."""
    monkeypatch.setattr(reading, "MAX_HEAD_CHARS", HEAD_CHARS)
    for marker in (*markers(form, REASONING.get(form)), "functools", "[", "to="):
        unit = marker + held
        to, text, most = parser(Recorded(form, "")), unit * (LONG_CHARS // len(unit)), 0
        num_bytes = 0
        for begin in range(0, len(text), SLICE_CHARS):
            given = text[begin : begin + SLICE_CHARS]
            to.push(given)
            assert to.spans is not None
            num_bytes += len(given.encode())
            most = max(most, num_bytes - to.spans.num_bytes)
        assert most <= 3 * (HEAD_CHARS + SLICE_CHARS) < LONG_CHARS, unit


BEGUN = {form: {"", *markers(form, REASONING.get(form)), "functools", "{"} for form in ToolFormat}
for _recorded in RECORDED:
    BEGUN[_recorded.form] |= {_recorded.text[:at] for at in range(0, len(_recorded.text), 7)}


@pytest.mark.parametrize("form", ToolFormat)
@pytest.mark.parametrize("unit", [" ", "a", "[", "<", '"'])
def test_little_is_looked_at_again_however_long_a_call_goes_on(
    form: ToolFormat, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece that arrives is added to what is not read yet: the work is the product of both."""
    monkeypatch.setattr(reading, "MAX_HEAD_CHARS", HEAD_CHARS)
    thoughts = REASONING.get(form, ReasoningFormat.THINK)
    sources: list[Source] = []

    def read_begun(source: Source) -> Reading:
        sources.append(source)
        if form is not ToolFormat.OPENAI:
            yield from reasoning_first(source, thoughts, is_open=False)
        yield from family_of(form).read(source, CallableTools(NAMES, str, TYPES))

    for begun in sorted(BEGUN[form]):
        to = FormatParser(read_begun)
        to.push(begun)
        for _ in range(LONG_CHARS // 512):
            to.push(unit * 512)
            assert len(sources[-1].text) <= 3 * HEAD_CHARS < LONG_CHARS, begun


def test_a_word_without_quotes_is_searched_once_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = []

    class Searched:
        def search(self, text: str, index: int) -> None:
            searched.append(len(text) - index)

    monkeypatch.setitem(literals.BARE_ENDS, (False, True), Searched())
    to = parser(Recorded(ToolFormat.GEMMA4, ""))
    to.push("<|tool_call>call:get_weather{city:")
    for _ in range(1000):
        to.push("a")
    assert sum(searched) == 1000


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "now", "x": ' + "9" * 5000 + "}",
        '{"name": "now", "arguments": ' + "[" * 3000 + "]" * 3000 + "}",
    ],
    ids=["long number", "deep list"],
)
def test_json_beyond_the_bounds_is_text(body: str) -> None:
    text = f" a <tool_call>{body}</tool_call> b "
    assert read(parser(Recorded(ToolFormat.HERMES, text)), [text]) == [Text(text)]


def test_arguments_that_break_off_being_json_are_passed_on_as_they_stand() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1,,}}\n</tool_call>ok'
    events = read(parser(Recorded(ToolFormat.HERMES, text)), [text])
    assert calls_of(events) == (("now", '{"a": 1,,}}\n'),)
    assert joined(events, Text) == "ok"


def test_arguments_come_as_they_are_written() -> None:
    to = parser(Recorded(ToolFormat.HERMES, ""))
    assert to.push('<tool_call>{"name": "now", "argum') == []
    assert not to.has_calls
    call, begun = to.push('ents": {"a": [1, {"b"')
    assert isinstance(call, ToolCall)
    assert (call.index, call.name, begun) == (0, "now", ToolArguments(0, '{"a": [1, {"b"'))
    assert to.has_calls
    assert to.push(': "}') == [ToolArguments(0, ': "}')]
    assert to.push('"}]}, "id": 7') == [ToolArguments(0, '"}]}')]
    assert to.push("}</tool_call>ok") == [Text("ok")]


def test_the_places_of_text_and_the_bytes_of_reasoning_are_known() -> None:
    raw = f"<think>é</think>\nüb{ZURICH}\n so"
    thinking = Recorded(ToolFormat.HERMES, raw, reasoning=ReasoningFormat.THINK)
    to = parser(thinking)
    read(to, raw)
    assert to.spans is not None
    shown = b"".join(
        raw.encode()[at : at + 1] for at in range(len(raw.encode())) if to.spans.holds(at, at + 1)
    )
    assert shown.decode() == "übso"
    to = parser(thinking)
    read(to, ["<think>\n\n</think>\n\nhi"])
    assert to.reasoning_bytes == len("<think>\n\n</think>")


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
    bare = f'{{"name": "now", "arguments": {written}}}'
    for form, text in (
        (ToolFormat.HERMES, f"<tool_call>\n{bare}\n</tool_call>"),
        (ToolFormat.LLAMA3_JSON, bare),
    ):
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        assert calls_of(read(parser(Recorded(form, text)), pieces)) == (("now", written),)


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
    assert read(PlainParser(), ["a", "", "<think>"]) == [Text("a<think>")]

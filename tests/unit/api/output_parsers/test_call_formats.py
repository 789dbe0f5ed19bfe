"""Calls in the formats of many families: texts as their models write them, cut at every place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.output_parsers.events import OutputEvent, Reasoning, Text, ToolArguments, ToolCall
from api.output_parsers.parser import (
    SLICE_CHARS,
    OutputParser,
    OutputParserFactory,
    ParserConfig,
    Thinking,
    merged,
)
from api.output_parsers.reading import MAX_HEAD_CHARS
from shared.text.tool_formats import ReasoningFormat, ToolFormat
from tests.support.examples import examples

NAMES = ("get_weather", "now")


@dataclass(frozen=True)
class Recorded:
    """A text of a model, and what is in it: reasoning, text and calls, each as one piece."""

    form: ToolFormat
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str = ""
    thoughts: str = ""
    reasoning: ReasoningFormat | None = None
    thinking: Thinking = Thinking.MAYBE


OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome", "days": 2}'
BOTH = (("get_weather", OSLO), ("get_weather", ROME))
D = "<｜tool▁calls▁begin｜>"
_FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_BARE = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_OBJECT = '{{"name": "get_weather", "arguments": {}}}'
LIST = f"[{_OBJECT.format(OSLO)}, {_OBJECT.format(ROME)}]"

RECORDED = [
    Recorded(ToolFormat.MISTRAL, f"[TOOL_CALLS] {LIST}", BOTH),
    Recorded(ToolFormat.MISTRAL, f"[TOOL_CALLS]{LIST}\n", BOTH),
    Recorded(
        ToolFormat.MISTRAL,
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "VvvODy9mT"}]',
        (("now", "{}"),),
    ),
    Recorded(ToolFormat.MISTRAL, f"[TOOL_CALLS] {_OBJECT.format(OSLO)}", BOTH[:1]),
    Recorded(
        ToolFormat.MISTRAL,
        f"I look.[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]get_weather[ARGS]{ROME}",
        BOTH,
        "I look.",
    ),
    Recorded(ToolFormat.MISTRAL, f"[TOOL_CALLS]get_weather{OSLO}", BOTH[:1]),
    Recorded(
        ToolFormat.MISTRAL, f"[TOOL_CALLS]get_weather[CALL_ID]bbc5b7ede[ARGS]{OSLO}", BOTH[:1]
    ),
    Recorded(
        ToolFormat.MISTRAL,
        f"[THINK]Which city?\n[/THINK]Oslo.\n[TOOL_CALLS]get_weather[ARGS]{OSLO}",
        BOTH[:1],
        "Oslo.",
        "Which city?",
        ReasoningFormat.MISTRAL,
    ),
    Recorded(
        ToolFormat.DEEPSEEK_V3,
        f"Both.\n\n{D}{_FENCED.format('get_weather', OSLO)}\n"
        f"{_FENCED.format('get_weather', ROME)}<｜tool▁calls▁end｜>",
        BOTH,
        "Both.",
    ),
    Recorded(
        ToolFormat.DEEPSEEK_V3,
        f"the city is Oslo.\n</think>\n\n{D}{_FENCED.format('now', '{}')}<｜tool▁calls▁end｜>",
        (("now", "{}"),),
        "",
        "the city is Oslo.",
        ReasoningFormat.THINK,
        Thinking.OPEN,
    ),
    Recorded(
        ToolFormat.DEEPSEEK_V31,
        f"{D}{_BARE.format('get_weather', OSLO)}{_BARE.format('get_weather', ROME)}"
        "<｜tool▁calls▁end｜> Done",
        BOTH,
        "Done",
    ),
    Recorded(
        ToolFormat.KIMI_K2,
        f"I look.{KIMI_BEGIN}{_KIMI.format('get_weather', 0, OSLO)}"
        f"{_KIMI.format('get_weather', 1, ROME)}{KIMI_END}",
        BOTH,
        "I look.",
    ),
    Recorded(
        ToolFormat.KIMI_K2,
        f"<think>Hm.</think>{KIMI_BEGIN}\n<|tool_call_begin|>now:0 "
        f"<|tool_call_argument_begin|> {{}} <|tool_call_end|>\n{KIMI_END}",
        (("now", "{}"),),
        "",
        "Hm.",
        ReasoningFormat.THINK,
    ),
    Recorded(ToolFormat.GRANITE, f"<|tool_call|>{LIST}", BOTH),
    Recorded(ToolFormat.GRANITE, f"<tool_call>{LIST}", BOTH),
    Recorded(
        ToolFormat.GRANITE,
        f"Here is my thought process: Oslo.\nHere is my response: So. <|tool_call|> {LIST}",
        BOTH,
        "So.",
        "Oslo.",
        ReasoningFormat.GRANITE,
    ),
    Recorded(
        ToolFormat.GRANITE,
        "Here's my thought process: yes Here's my response: Yes.",
        (),
        "Yes.",
        "yes",
        ReasoningFormat.GRANITE,
    ),
    Recorded(ToolFormat.PHI4_MINI_JSON, f"functools{LIST}", BOTH),
    Recorded(ToolFormat.HUNYUAN_A13B, f"<tool_calls>{LIST}</tool_calls>", BOTH),
    Recorded(
        ToolFormat.HUNYUAN_A13B,
        f"So <tool_calls>\n[\n{_OBJECT.format(OSLO)},\n{_OBJECT.format(ROME)}\n]\n</tool_calls>\n",
        BOTH,
        "So",
    ),
]

C, M, END = "<|channel|>", "<|message|>", "<|end|>"
ASSISTANT = "<|end|><|start|>assistant"
THINKS = f"{C}analysis{M}We need the weather.{ASSISTANT}"
HARMONY = [
    (f"{C}final{M}Hi there!\n", (), "Hi there!\n", ""),
    (f"{THINKS}{C}final{M}Yes.<|return|>", (), "Yes.", "We need the weather."),
    (
        f"{THINKS}{C}commentary to=functions.get_weather <|constrain|>json{M}{OSLO}<|call|>",
        BOTH[:1],
        "",
        "We need the weather.",
    ),
    (f" to=functions.get_weather{C}commentary json{M}{OSLO}", BOTH[:1], "", ""),
    (
        f"{THINKS}{C}commentary{M}I look.{ASSISTANT}{C}analysis{M}Now.{ASSISTANT}"
        f"{C}commentary to=functions.now <|constrain|>json{M}<|call|>",
        (("now", "{}"),),
        "I look.",
        "We need the weather.\nNow.",
    ),
    (f"{C}commentary{M}One.{ASSISTANT}{C}final{M}Two.", (), "One.\nTwo.", ""),
    (f"{C}analysis{M}to the end", (), "", "to the end"),
    # Calls of what is not callable, headers that never end, and none at all are text.
    (
        f"{C}commentary to=functions.rm{M}{{}}<|call|>",
        (),
        f"{C}commentary to=functions.rm{M}{{}}",
        "",
    ),
    (f"{C}commentary to=python code{M}1+1", (), f"{C}commentary to=python code{M}1+1", ""),
    (f"{C}fin", (), f"{C}fin", ""),
    (f"{C}{'x' * 2000}{M}", (), f"{C}{'x' * 2000}{M}", ""),
    ("No header <|channel", (), "No header <|channel", ""),
    (f"No header{ASSISTANT}{C}final{M}Yes.", (), "No header\nYes.", ""),
    ("to=", (), "to=", ""),
    ("", (), "", ""),
]
RECORDED += [
    Recorded(ToolFormat.OPENAI, text, calls, content, thoughts, ReasoningFormat.OPENAI)
    for text, calls, content, thoughts in HARMONY
]
RECORDED += [
    Recorded(
        ToolFormat.OPENAI,
        f"the city is Oslo{ASSISTANT}{C}final{M}Oslo.",
        (),
        "Oslo.",
        "the city is Oslo",
        ReasoningFormat.OPENAI,
        Thinking.OPEN,
    )
]

# What is no call, or breaks off: it is all text, in this form.
TEXTS = [
    (ToolFormat.MISTRAL, "[TOOL_CALLS]rm[ARGS]{}"),
    (ToolFormat.MISTRAL, '[TOOL_CALLS] [{"name": "rm", "arguments": {}}]'),
    (ToolFormat.MISTRAL, "[TOOL_CALLS] [TOOL_CALLS] [] [TOOL_CALLS]now[ARGS]null"),
    (ToolFormat.MISTRAL, "[TOOL_CALLS]now"),
    (ToolFormat.MISTRAL, "[TOOL_CALLS]" + "n" * 300 + "{}"),
    (ToolFormat.DEEPSEEK_V3, f"{D}now"),
    (ToolFormat.DEEPSEEK_V3, f"{D}{_FENCED.format('rm', '{}')}<｜tool▁calls▁end｜>"),
    (ToolFormat.DEEPSEEK_V3, f"{D}{_FENCED.format('now', '5')}"),
    (ToolFormat.DEEPSEEK_V31, f"{D}<｜tool▁call▁begin｜>now{{}}"),
    (ToolFormat.KIMI_K2, f"{KIMI_BEGIN}{KIMI_END} and so"),
    (ToolFormat.KIMI_K2, f"{KIMI_BEGIN}{_KIMI.format('rm', 0, '{}')}{KIMI_END}"),
    (ToolFormat.GRANITE, "<|tool_call|>[] <tool_call>no [1, 2]"),
    (ToolFormat.PHI4_MINI_JSON, "functools [x], import functools"),
    (ToolFormat.HUNYUAN_A13B, "<tool_calls>[5]</tool_calls>"),
]


def parser(recorded: Recorded) -> OutputParser:
    config = ParserConfig(
        tool_format=recorded.form,
        names=NAMES,
        reasoning_format=recorded.reasoning,
        thinking=recorded.thinking,
    )
    return OutputParserFactory(config, "seed")()


def read(to: OutputParser, pieces: Iterable[str]) -> list[OutputEvent]:
    events = [event for piece in pieces for event in to.push(piece)]
    return merged([*events, *to.finish()])


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


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.text[:40])
def test_a_recorded_text_may_break_off_anywhere(recorded: Recorded) -> None:
    """What there is of a call is a beginning of it."""
    for at in range(len(recorded.text)):
        calls = calls_of(read(parser(recorded), [recorded.text[:at]]))
        for (name, arguments), (whole_name, whole) in zip(calls, recorded.calls, strict=False):
            assert name == whole_name
            assert whole.startswith(arguments)
        assert len(calls) <= len(recorded.calls)


@pytest.mark.parametrize(("form", "text"), TEXTS, ids=[text[:40] for _, text in TEXTS])
def test_what_is_no_call_is_text_wherever_it_is_cut(form: ToolFormat, text: str) -> None:
    recorded = Recorded(form, text)
    for at in range(len(text) + 1):
        assert read(parser(recorded), [text[:at], text[at:]]) == [Text(text)], at
    assert read(parser(recorded), text) == [Text(text)]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.text[:40])
def test_arguments_are_streamed_behind_the_name(recorded: Recorded) -> None:
    """A call is announced before its last argument is there, and its arguments are not gathered."""
    if not any("city" in arguments for _, arguments in recorded.calls):
        return
    to, begin = parser(recorded), recorded.text.index('Oslo"')
    before = [event for char in recorded.text[:begin] for event in to.push(char)]
    assert any(isinstance(event, ToolCall) for event in before)
    after = [event for char in "Os" for event in to.push(char)]
    assert "".join(e.text for e in after if isinstance(e, ToolArguments)) == "Os"


PIECES = [
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<think>", "</think>"),
    *(D, "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("function", "```json", "```", KIMI_BEGIN, KIMI_END, "<|tool_call_begin|>", "functions."),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call|>", "<tool_call>"),
    *("</tool_call>", "functools", "<tool_calls>", "</tool_calls>", "now", "get_weather", ":0"),
    *("{}", OSLO, "[", "]", ",", "{", "}", '"', " ", "\n", "é", "text", "<", "Here is my"),
    *(C, M, END, "<|start|>", "assistant", "to=functions.now", "<|constrain|>", "<|call|>"),
    *("final", "analysis", "commentary", " thought process:", " response:", LIST, "\\"),
    *(_OBJECT.format(OSLO), '"name": "now"'),
]  # fmt: skip


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in itertools.pairwise(bounds)]


REASONING = {
    ToolFormat.MISTRAL: ReasoningFormat.MISTRAL,
    ToolFormat.GRANITE: ReasoningFormat.GRANITE,
}


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
@given(cut=cut_texts())
def test_nothing_is_lost_of_a_text_without_calls(
    form: ToolFormat, cut: tuple[str, list[str]]
) -> None:
    text, pieces = cut
    to = parser(Recorded(form, text))
    events = read(to, pieces)
    if not to.has_calls and form is not ToolFormat.OPENAI:
        assert joined(events, Text) == text.removeprefix("<|python_tag|>")
        return
    rest = iter(text)
    shown = joined(events, Text)
    if form is ToolFormat.OPENAI:  # lines between messages are not the model's
        shown = "".join(shown.split())
    assert all(char in rest for char in shown)  # in order


MEBIBYTE = 2**20


@pytest.mark.parametrize("form", ToolFormat)
@pytest.mark.parametrize("held", ["", '{"x": "'])
def test_little_is_held_back_of_a_mebibyte_of_anything(form: ToolFormat, held: str) -> None:
    """What is held back is read and copied again: without a bound, once for each of its parts."""
    for piece in PIECES:
        if len(piece) < 2:
            continue
        unit = piece + held
        to, text, most = parser(Recorded(form, "")), unit * (MEBIBYTE // len(unit)), 0
        num_bytes = 0
        for begin in range(0, len(text), SLICE_CHARS):
            given = text[begin : begin + SLICE_CHARS]
            to.push(given)
            assert to.spans is not None
            num_bytes += len(given.encode())
            most = max(most, num_bytes - to.spans.num_bytes)
        assert most <= 3 * (MAX_HEAD_CHARS + SLICE_CHARS), unit

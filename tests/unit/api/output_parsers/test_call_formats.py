"""Calls in the formats of many families: texts as their models write them, cut at every place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.output_parsers import literals, reading
from api.output_parsers.events import (
    OutputEvent,
    OutputParser,
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
    Recorded(
        ToolFormat.GRANITE,
        "<think>Which city?</think> <response>\nOslo, <response>.\n</response>\n",
        (),
        "Oslo, <response>.\n",
        "Which city?",
        ReasoningFormat.GRANITE33,
    ),
    Recorded(
        ToolFormat.GRANITE,
        f"<think>Oslo.</think><response>So. <|tool_call|>{LIST}</response> </response>",
        BOTH,
        "So. </response>",
        "Oslo.",
        ReasoningFormat.GRANITE33,
    ),
    Recorded(  # what has no beginning has no end
        ToolFormat.GRANITE,
        "<think>Oslo.</think>It is </response>.",
        (),
        "It is </response>.",
        "Oslo.",
        ReasoningFormat.GRANITE33,
    ),
    Recorded(
        ToolFormat.HUNYUAN_A13B,
        "<think>\nHm.\n</think>\n<answer>\nOslo.\n</answer>",
        (),
        "Oslo.",
        "Hm.",
        ReasoningFormat.HUNYUAN_A13B,
    ),
    Recorded(
        ToolFormat.COHERE_COMMAND3,
        "<|START_THINKING|>Both.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {OSLO}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "get_weather", "parameters": {ROME}}}\n'
        "]<|END_ACTION|>",
        BOTH,
        "",
        "Both.",
        ReasoningFormat.COHERE_COMMAND3,
    ),
    # Calls that are written before the reasoning is closed.
    Recorded(
        ToolFormat.KIMI_K2,
        f"<think>I look.\n{KIMI_BEGIN}{_KIMI.format('get_weather', 0, OSLO)}{KIMI_END}",
        BOTH[:1],
        "",
        "I look.",
        ReasoningFormat.THINK,
    ),
    Recorded(
        ToolFormat.MISTRAL,
        f"[THINK]I look.[TOOL_CALLS]get_weather[ARGS]{OSLO}",
        BOTH[:1],
        "",
        "I look.",
        ReasoningFormat.MISTRAL,
    ),
    Recorded(ToolFormat.PHI4_MINI_JSON, f"functools{LIST}", BOTH),
    Recorded(ToolFormat.NEMOTRON_JSON, f"<TOOLCALL>{LIST}</TOOLCALL>", BOTH),
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

TYPES = {
    "get_weather": {
        "city": ("string",),
        "days": ("integer",),
        "tags": ("array",),
        "where": ("object", "null"),
        "note": ("string", "null"),
        "dry": ("boolean",),
    }
}
_GLM_OSLO = "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
_QWEN_OSLO = "<parameter=city>\nOslo\n</parameter>\n"
_MINIMAX_OSLO = '<parameter name="city">Oslo</parameter>\n'
_ROME = (
    '{"city": "Rome\\n\\"1\\"", "days": 2, "tags": ["a", {"b": null}], "note": null, '
    '"dry": false, "else": 5}'
)
_PAIRS = (
    ("city", 'Rome\n"1"'),
    ("days", "2"),
    ("tags", '["a", {"b": null}]'),
    ("note", "null"),
    ("dry", "False"),
    ("else", "5"),
)
_GLM_ROME = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _PAIRS
)
_QWEN_ROME = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _PAIRS)
_MINIMAX_ROME = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in _PAIRS)
_SEED_OSLO = "<parameter=city>Oslo</parameter>\n"
_SEED_ROME = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in _PAIRS)
TYPED = (("get_weather", OSLO), ("get_weather", _ROME))
_PYTHON_ROME = (
    "get_weather(city='Rome\\n\"1\"', days=2, tags=['a', {'b': None}], note=None, dry=False, "
    "else=5)"
)
_GEMMA_ROME = (
    'call:get_weather{{city:{q}Rome\n"1"{q},days:2,tags:[{q}a{q},{{b:null}}],note:null,'
    "dry:false,else:5}}"
)
RECORDED += [
    Recorded(
        ToolFormat.GLM45,
        f"<think>Hm.</think>\nI look.\n<tool_call>get_weather\n{_GLM_OSLO}</tool_call>\n"
        f"<tool_call>get_weather\n{_GLM_ROME}</tool_call>",
        TYPED,
        "I look.",
        "Hm.",
        ReasoningFormat.THINK,
    ),
    Recorded(
        ToolFormat.GLM45,
        "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Oslo</arg_value></tool_call>",
        (("now", "{}"), TYPED[0]),
    ),
    Recorded(
        ToolFormat.QWEN3_CODER,
        f"So:\n<tool_call>\n<function=get_weather>\n{_QWEN_OSLO}</function>\n</tool_call>\n"
        f"<tool_call>\n<function=get_weather>\n{_QWEN_ROME}</function>\n</tool_call>\n Done",
        TYPED,
        "So:Done",
    ),
    Recorded(
        ToolFormat.QWEN3_CODER,
        "<tool_call>\n<function=now>\n</function>\n<function=get_weather><parameter=city>Oslo"
        "</parameter></function></tool_call>",
        (("now", "{}"), TYPED[0]),
    ),
    Recorded(
        ToolFormat.MINIMAX_M2,
        f'<minimax:tool_call>\n<invoke name="get_weather">\n{_MINIMAX_OSLO}</invoke>\n'
        f'<invoke name="get_weather">\n{_MINIMAX_ROME}</invoke>\n</minimax:tool_call>',
        TYPED,
    ),
    Recorded(
        ToolFormat.SEED_OSS,
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=get_weather>\n"
        f"{_SEED_OSLO}</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        f"<function=get_weather>\n{_SEED_ROME}</function>\n</seed:tool_call>",
        TYPED,
        "",
        "Hm.",
        ReasoningFormat.SEED_OSS,
    ),
    Recorded(
        ToolFormat.PYTHONIC, f'[get_weather(city="Oslo"), {_PYTHON_ROME}] Done', TYPED, "Done"
    ),
    Recorded(
        ToolFormat.PYTHONIC,
        "<|python_start|>[now( ), get_weather(city='''Oslo''', )]<|python_end|>",
        (("now", "{}"), TYPED[0]),
    ),
    Recorded(
        ToolFormat.PYTHONIC,
        "```tool_code\nget_weather(city='Oslo')\nnow()\n```",
        (TYPED[0], ("now", "{}")),
    ),
    Recorded(  # a number in quotes, where the schema has no text
        ToolFormat.PYTHONIC,
        '[get_weather(city="Rome", days="2")]',
        (("get_weather", ROME),),
    ),
    Recorded(
        ToolFormat.FUNCTIONGEMMA,
        "I look. <start_function_call>call:get_weather{city:<escape>Oslo<escape>}"
        f"<end_function_call><start_function_call>{_GEMMA_ROME.format(q='<escape>')}"
        "<end_function_call>",
        TYPED,
        "I look.",
    ),
    Recorded(
        ToolFormat.GEMMA4,
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}'
        "<tool_call|><|tool_call>" + _GEMMA_ROME.format(q='<|"|>') + "<tool_call|>",
        TYPED,
        "",
        "Hm.",
        ReasoningFormat.GEMMA4,
    ),
]


def _dsml(section: str, space: str) -> str:
    """Two calls, with a text that is a number and a value without the attribute."""
    mark = f"｜DSML｜{space}"
    return (
        f'<｜DSML｜{section}>\n<{mark}invoke name="get_weather">\n'
        f'<{mark}parameter name="city" string="true">Oslo</{mark}parameter>\n</{mark}invoke>\n'
        f'<{mark}invoke name="get_weather">\n'
        f'<{mark}parameter name="city" string="true">7\n</{mark}parameter>\n'
        f'<{mark}parameter name="days">2</{mark}parameter>\n'
        f'<{mark}parameter name="tags" string="false">["a", {{"b": null}}]</{mark}parameter>\n'
        f'<{mark}parameter name="else" string="false">5</{mark}parameter>\n'
        f"</{mark}invoke>\n</｜DSML｜{section}>"
    )


DSML_CALLS = (
    ("get_weather", OSLO),
    ("get_weather", '{"city": "7\\n", "days": 2, "tags": ["a", {"b": null}], "else": 5}'),
)
DSML_FORMS = (
    (ToolFormat.DEEPSEEK_V32, "function_calls", ""),
    (ToolFormat.DEEPSEEK_V4, "tool_calls", ""),
    (ToolFormat.DEEPSEEK_V41, " calls", " "),
)
RECORDED += [
    recorded
    for form, section, space in DSML_FORMS
    for recorded in (
        Recorded(form, f"I look.\n\n{_dsml(section, space)}", DSML_CALLS, "I look."),
        Recorded(  # a call before the reasoning is closed
            form,
            f"Both.\n{_dsml(section, space)}",
            DSML_CALLS,
            "",
            "Both.",
            ReasoningFormat.THINK,
            Thinking.OPEN,
        ),
    )
]

# Slips of models: the opening of a section is missing, values are Python's.
_TAGS = '{"tags": ["a", true, null, {"b": [1.5, "it\'s"]}]}'
_WHERE = '{"where": {"a": true, "b": null}}'
_PYTHON_TAGS = """['a', True, None, {'b': (1.5, "it's",)}]"""
_PYTHON_WHERE = "{'a': True, 'b': None}"
PYTHON_CALLS = (("get_weather", _TAGS), ("get_weather", _WHERE))


def _between_tags(begin: str, key: str, close: str, call_close: str) -> str:
    return "\n".join(
        f"{begin.format('get_weather')}\n{key.format(name)}{value}{close}\n{call_close}"
        for name, value in (("tags", _PYTHON_TAGS), ("where", _PYTHON_WHERE))
    )


_FUNCTION = _between_tags("<function={}>", "<parameter={}>", "</parameter>", "</function>")
_INVOKE = _between_tags('<invoke name="{}">', '<parameter name="{}">', "</parameter>", "</invoke>")
RECORDED += [
    Recorded(form, text, PYTHON_CALLS, content)
    for form, text, content in (
        (ToolFormat.QWEN3_CODER, f"<tool_call>\n{_FUNCTION}\n</tool_call>", ""),
        (ToolFormat.QWEN3_CODER, f"I look.\n\n{_FUNCTION}\n</tool_call>", "I look."),
        (ToolFormat.QWEN3_CODER, f"I <function=rm> look.\n{_FUNCTION}", "I <function=rm> look."),
        (ToolFormat.SEED_OSS, f"I look.\n{_FUNCTION}\n</seed:tool_call>", "I look."),
        (ToolFormat.MINIMAX_M2, f"I look.\n{_INVOKE}\n</minimax:tool_call>", "I look."),
        (
            ToolFormat.GLM45,
            f"<tool_call>get_weather\n<arg_key>tags</arg_key>\n<arg_value>{_PYTHON_TAGS}"
            "</arg_value>\n</tool_call>\n<tool_call>get_weather\n<arg_key>where</arg_key>\n"
            f"<arg_value>{_PYTHON_WHERE}</arg_value>\n</tool_call>",
            "",
        ),
        *(
            (
                form,
                "I look.\n"
                + _between_tags(
                    f'<｜DSML｜{space}invoke name="{{}}">',
                    f'<｜DSML｜{space}parameter name="{{}}" string="false">',
                    f"</｜DSML｜{space}parameter>",
                    f"</｜DSML｜{space}invoke>",
                )
                + f"\n</｜DSML｜{section}>",
                "I look.",
            )
            for form, section, space in DSML_FORMS
        ),
    )
]
RECORDED += [
    Recorded(
        ToolFormat.KIMI_K2,
        f"I look.{_KIMI.format('now', 0, '{}')}",
        (("now", "{}"),),
        "I look.",
    ),
    Recorded(
        ToolFormat.DEEPSEEK_V31,
        f"I look.{_BARE.format('get_weather', OSLO)}<｜tool▁calls▁end｜>",
        BOTH[:1],
        "I look.",
    ),
]

# What is no call, or breaks off: it is all text, in this form.
TEXTS = [
    (ToolFormat.QWEN3_CODER, "Write <function=now> or <function=rm>\n</function>"),
    (ToolFormat.KIMI_K2, _KIMI.format("rm", 0, "{}")),
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
    (ToolFormat.GLM45, "<tool_call>rm\n<arg_key>a</arg_key><tool_call>now"),
    (ToolFormat.GLM45, '<tool_call>{"name": "now"}</tool_call>'),
    (ToolFormat.QWEN3_CODER, "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
    (ToolFormat.QWEN3_CODER, "<tool_call>\n<function=now>\ntext"),
    (ToolFormat.MINIMAX_M2, '<minimax:tool_call>\n<invoke name="rm">\n</invoke>'),
    (ToolFormat.DEEPSEEK_V32, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="rm">\n'),
    (ToolFormat.DEEPSEEK_V32, '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n'),
    (ToolFormat.DEEPSEEK_V4, '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\ntext'),
    (ToolFormat.PYTHONIC, "[rm()]"),
    (ToolFormat.PYTHONIC, "[1, 2] and now()"),
    (ToolFormat.PYTHONIC, "I call [now()]"),
    (ToolFormat.PYTHONIC, "[now(1)]"),
    (ToolFormat.PYTHONIC, "now()"),
    (ToolFormat.PYTHONIC, "```python\nprint(1)\n```"),
    (ToolFormat.PYTHONIC, "<|python_start|>"),
    (ToolFormat.FUNCTIONGEMMA, "<start_function_call>call:rm{}<end_function_call>"),
    (ToolFormat.GEMMA4, "<|tool_call>now{}<tool_call|>"),
]


# The values are bare text: what one is depends on all of it.
BY_TYPE = UNTYPED_FORMATS - {ToolFormat.PYTHONIC} | {form for form, _, _ in DSML_FORMS}


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
    *(_OBJECT.format(OSLO), '"name": "now"', r"\ud800", "days=", '"{\\"city\\": \\"', '\\"}"'),
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

"""Texts as models of many families write them, and the reasoning, text and calls in each."""

from __future__ import annotations

from dataclasses import dataclass

from api.output_parsers.parser import Thinking
from shared.text.tool_formats import ReasoningFormat, ToolFormat

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
OBJECT = '{{"name": "get_weather", "arguments": {}}}'
LIST = f"[{OBJECT.format(OSLO)}, {OBJECT.format(ROME)}]"

RECORDED = [
    Recorded(ToolFormat.MISTRAL, f"[TOOL_CALLS] {LIST}", BOTH),
    Recorded(ToolFormat.MISTRAL, f"[TOOL_CALLS]{LIST}\n", BOTH),
    Recorded(
        ToolFormat.MISTRAL,
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "VvvODy9mT"}]',
        (("now", "{}"),),
    ),
    Recorded(ToolFormat.MISTRAL, f"[TOOL_CALLS] {OBJECT.format(OSLO)}", BOTH[:1]),
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
        f"So <tool_calls>\n[\n{OBJECT.format(OSLO)},\n{OBJECT.format(ROME)}\n]\n</tool_calls>\n",
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

# Hermes' and Llama's, whose JSON may be written in several ways.
ZURICH = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
_ZURICH = ("get_weather", '{"city": "Zürich"}')
_LLAMA = '{"name": "now", "parameters": {"a": "b"}}'
_HM = "hm,\n<tool_call> maybe"
RECORDED += [
    *(
        Recorded(ToolFormat.HERMES, f"<tool_call>{body}</tool_call>", (("now", arguments),))
        for body, arguments in (
            ('{"arguments": {"a": 1}, "name": "now"}', '{"a": 1}'),
            ('{"name": "now", "parameters": {"a": 1}}', '{"a": 1}'),
            ('{"name": "now"}', "{}"),
            ('{"name": "now", "arguments": null}', "{}"),
            ('{"name": "now", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
            ('{"id": -1.5e3, "x": [true, null], "name": "\\u006eow", "arguments": {}}', "{}"),
            ('{"name": "now", "arguments": {"text": "two\nlines"}}', '{"text": "two\nlines"}'),
            ('{"name": "now", "arguments": {"t": "</tool_call>"}}', '{"t": "</tool_call>"}'),
        )
    ),
    *(
        Recorded(ToolFormat.HERMES, text, calls, content)
        for text, calls, content in (
            (f"Let me look.\n{ZURICH}", (_ZURICH,), "Let me look."),
            (
                f'\n\n{ZURICH}\n<tool_call>{{"name":"now","arguments":{{ }}}}</tool_call>\n',
                (_ZURICH, ("now", "{ }")),
                "",
            ),
            (
                f"<tool_call> <tool_call>x{ZURICH}</tool_call>",
                (_ZURICH,),
                "<tool_call> <tool_call>x</tool_call>",
            ),
            ('<tool_call>{"name": "now", "arguments": {"a": "b', (("now", '{"a": "b'),), ""),
            (
                '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>',
                (("now", "{}"),),
                "}\n</tool_call>",
            ),
            ('<tool_call>{"name": "now", "arguments": {}; rest', (("now", "{}"),), "; rest"),
        )
    ),
    *(
        Recorded(ToolFormat.LLAMA3_JSON, text, (("now", '{"a": "b"}'),) * num_calls, content)
        for text, num_calls, content in (
            (_LLAMA, 1, ""),
            (f" <|python_tag|>\n{_LLAMA}", 1, ""),
            (f"{_LLAMA}; {_LLAMA}\n{_LLAMA} done", 3, "done"),
            (_LLAMA + '; {"x": 1}; ', 1, '; {"x": 1}; '),
        )
    ),
    *(
        Recorded(ToolFormat.HERMES, text, calls, content, thoughts, ReasoningFormat.THINK, thinking)
        for text, calls, content, thoughts, thinking in (
            (f"<think>\n{_HM}\n</think>\n\nAnswer.\n", (), "Answer.\n", _HM, Thinking.MAYBE),
            (f"<think>\n{_HM}\n</think>\n\nAnswer.\n", (), "Answer.\n", _HM, Thinking.OPEN),
            (f"{_HM}\n</think>\n\nAnswer.\n", (), "Answer.\n", _HM, Thinking.OPEN),
            ("<think>on and on </thin", (), "", "on and on </thin", Thinking.MAYBE),
            ("on and on", (), "", "on and on", Thinking.OPEN),
            (f"<think>I look.</think>\n{ZURICH}", (_ZURICH,), "", "I look.", Thinking.MAYBE),
            ("<think>\n\n</think>\n\nhi", (), "hi", "", Thinking.MAYBE),
            *(
                (text, (), text, "", Thinking.MAYBE)
                for text in ("Well <think>no</think>", "<thinking>", "<thi", " a</think>")
            ),
        )
    ),
]
TEXTS += [
    (ToolFormat.HERMES, "so <tool_ca"),
    *(
        (ToolFormat.HERMES, f" a <tool_call>{body}</tool_call> b ")
        for body in (
            *("", "hello", "{", "{}", "[1]", '{"arguments": {}}', '{"name" "now"}'),
            *('{"name": 5, "arguments": {}}', '{"name": "nobody", "arguments": {}}'),
            *('{"name": "now", "arguments": [1]}', '{"name": "now", "arguments": "[1]"}'),
            *('{"name": "now", "arguments": "not json"}', '{"name": "now", "arguments": 5}'),
            *(
                '{"name": "now\n", "arguments": {}}',
                '{"name": "now\\x"}',
                '{"name": "now", "x": 01}',
            ),
            *('{"name": "now", "x": nul}', '{"name": "now", "x": "\\u00g0"}'),
        )
    ),
    *(
        (ToolFormat.LLAMA3_JSON, text)
        for text in (
            *(f"I call {_LLAMA}", '{"name": "Ada", "parameters": {}}', '{"answer": 42}'),
            *(" \n{not json", "   ", "{", "<|python"),
        )
    ),
]

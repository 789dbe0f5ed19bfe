"""Formats of tool calls and reasoning in a model's text: their names on its card, how they look."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ToolFormat(StrEnum):
    """How a model writes tool calls in its text. Named as in vLLM."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere
    LLAMA3_JSON = "llama3_json"  # {"name": ..., "parameters": {...}}, from the first character on
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ...}, ...], or [TOOL_CALLS]name[ARGS]{...}
    DEEPSEEK_V3 = "deepseek_v3"  # also R1: a fenced block of JSON after <｜tool▁sep｜>name
    DEEPSEEK_V31 = "deepseek_v31"  # name<｜tool▁sep｜>{...}
    DEEPSEEK_V32 = "deepseek_v32"  # DSML: tags around each argument that mark it as text or not
    DEEPSEEK_V4 = "deepseek_v4"  # the same in <｜DSML｜tool_calls>
    DEEPSEEK_V41 = "deepseek_v41"  # the same in <｜DSML｜ calls>, a space in each tag
    KIMI_K2 = "kimi_k2"  # functions.name:0<|tool_call_argument_begin|>{...}
    GRANITE = "granite"  # <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    PHI4_MINI_JSON = "phi4_mini_json"  # functools[{"name": ..., "arguments": {...}}, ...]
    HUNYUAN_A13B = "hunyuan_a13b"  # <tool_calls>[{"name": ..., ...}, ...]</tool_calls>
    NEMOTRON_JSON = "nemotron_json"  # <TOOLCALL>[{"name": ..., ...}, ...]</TOOLCALL>
    COHERE_COMMAND3 = "cohere_command3"  # <|START_ACTION|>[{"tool_name": ...}]<|END_ACTION|>
    GLM45 = "glm45"  # <tool_call>name <arg_key>key</arg_key> <arg_value>value</arg_value>
    QWEN3_CODER = "qwen3_coder"  # <tool_call> <function=name> <parameter=key>value</parameter>
    SEED_OSS = "seed_oss"  # the same between <seed:tool_call> and </seed:tool_call>
    MINIMAX_M2 = "minimax_m2"  # <invoke name="name"> <parameter name="key">value</parameter>
    PYTHONIC = "pythonic"  # [name(key="value", ...), ...], from the first character on
    FUNCTIONGEMMA = "functiongemma"  # <start_function_call>call:name{key:<escape>value<escape>}
    GEMMA4 = "gemma4"  # <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>
    OPENAI = "openai"  # harmony: <|channel|>commentary to=functions.name ... <|message|>{...}
    TEXT = "text"  # not known: calls are text of the answer


# They write a value as bare text: its type is the schema's.
UNTYPED_FORMATS = frozenset(
    {
        ToolFormat.GLM45,
        ToolFormat.QWEN3_CODER,
        ToolFormat.SEED_OSS,
        ToolFormat.MINIMAX_M2,
        ToolFormat.PYTHONIC,
    }
)


class ReasoningFormat(StrEnum):
    """What marks the reasoning, at the start of the text."""

    THINK = "think"  # <think> ... </think>
    SEED_OSS = "seed_oss"  # <seed:think> ... </seed:think>
    MISTRAL = "mistral"  # [THINK] ... [/THINK]
    OPENAI = "openai"  # harmony: messages on the channel `analysis`
    COHERE_COMMAND3 = "cohere_command3"  # <|START_THINKING|> ... <|END_THINKING|>
    GEMMA4 = "gemma4"  # <|channel>thought ... <channel|>
    GRANITE = "granite"  # Here is my thought process: ... Here is my response:
    GRANITE33 = "granite33"  # <think> ... </think> <response> the answer </response>
    HUNYUAN_A13B = "hunyuan_a13b"  # <think> ... </think> <answer> the answer </answer>


def tool_format_of(name: str | None) -> ToolFormat | None:
    """Returns a card's format; None also for one of a newer release."""
    return ToolFormat(name) if name in set(ToolFormat) else None


def reasoning_format_of(name: str | None) -> ReasoningFormat | None:
    """Returns a card's format; None also for one of a newer release."""
    return ReasoningFormat(name) if name in set(ReasoningFormat) else None


# What opens and what closes the reasoning; the first of each is what models are trained to write.
REASONING_MARKERS: Mapping[ReasoningFormat, tuple[tuple[str, ...], tuple[str, ...]]] = {
    ReasoningFormat.THINK: (("<think>",), ("</think>",)),
    ReasoningFormat.SEED_OSS: (("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat.MISTRAL: (("[THINK]",), ("[/THINK]",)),
    ReasoningFormat.GRANITE: (
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat.GEMMA4: (("<|channel>thought",), ("<channel|>",)),
    ReasoningFormat.COHERE_COMMAND3: (("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    ReasoningFormat.OPENAI: (("<|channel|>analysis<|message|>",), ("<|end|>",)),
    ReasoningFormat.GRANITE33: (("<think>",), ("</think>",)),
    ReasoningFormat.HUNYUAN_A13B: (("<think>",), ("</think>",)),
}
# Markers around the answer after the reasoning, which are not part of it.
ANSWER_MARKERS: Mapping[ReasoningFormat, tuple[str, str]] = {
    ReasoningFormat.GRANITE33: ("<response>", "</response>"),
    ReasoningFormat.HUNYUAN_A13B: ("<answer>", "</answer>"),
}

_DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
# The token between the brackets of every tag of DeepSeek's DSML.
DSML = "｜DSML｜"
_HARMONY = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
_TOOL_MARKERS: Mapping[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ToolFormat.DEEPSEEK_V3: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V31: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V32: (DSML,),
    ToolFormat.DEEPSEEK_V4: (DSML,),
    ToolFormat.DEEPSEEK_V41: (DSML,),
    ToolFormat.KIMI_K2: (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    ToolFormat.GRANITE: ("<|tool_call|>", "<tool_call>"),
    ToolFormat.HUNYUAN_A13B: ("<tool_calls>", "</tool_calls>"),
    ToolFormat.NEMOTRON_JSON: ("<TOOLCALL>", "</TOOLCALL>"),
    ToolFormat.COHERE_COMMAND3: ("<|START_ACTION|>", "<|END_ACTION|>"),
    ToolFormat.GLM45: (
        *("<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat.QWEN3_CODER: ("<tool_call>", "</tool_call>"),
    ToolFormat.SEED_OSS: ("<seed:tool_call>", "</seed:tool_call>"),
    ToolFormat.MINIMAX_M2: ("<minimax:tool_call>", "</minimax:tool_call>"),
    ToolFormat.PYTHONIC: ("<|python_start|>", "<|python_end|>"),
    ToolFormat.FUNCTIONGEMMA: ("<start_function_call>", "<end_function_call>", "<escape>"),
    ToolFormat.GEMMA4: ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ToolFormat.OPENAI: _HARMONY,
}

# The name of a tool, and of its argument, that are in no template's own text.
PROBE, KEY = "qzxj", "jxzq"
_ARGUMENTS = rf'\{{\s*"{KEY}"'
_CALL_OBJECT = (
    rf'\{{(?=[^<]*"name":\s*"{PROBE}")(?=[^<]*"(?:arguments|parameters)":\s*{_ARGUMENTS})'
)


def _dsml(section: str, space: str) -> str:
    return (
        rf'<{DSML}{section}>\s*<{DSML}{space}invoke name="{PROBE}">'
        rf'\s*<{DSML}{space}parameter name="{KEY}"'
    )


# Patterns of a call in a rendered template (`template_formats.py`); the first match is the format.
WRITTEN_CALLS: Mapping[ToolFormat, str] = {
    ToolFormat.HUNYUAN_A13B: rf"<tool_calls>\s*\[\s*{_CALL_OBJECT}",
    ToolFormat.NEMOTRON_JSON: rf"<TOOLCALL>\s*\[\s*{_CALL_OBJECT}",
    ToolFormat.COHERE_COMMAND3: (
        rf'<\|START_ACTION\|>\s*\[[^<]*"tool_name":\s*"{PROBE}"[^<]*"parameters":\s*{_ARGUMENTS}'
    ),
    ToolFormat.GRANITE: rf"<\|?tool_call\|?>\s*\[\s*{_CALL_OBJECT}",
    ToolFormat.HERMES: rf"<tool_call>\s*{_CALL_OBJECT}",
    ToolFormat.MISTRAL: rf"\[TOOL_CALLS\]\s*(?:\[?\s*{_CALL_OBJECT}|{PROBE}[^{{]*{_ARGUMENTS})",
    ToolFormat.DEEPSEEK_V3: (
        rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{PROBE}\s*```json\s*{_ARGUMENTS}"
    ),
    ToolFormat.DEEPSEEK_V31: rf"<｜tool▁call▁begin｜>{PROBE}<｜tool▁sep｜>\s*{_ARGUMENTS}",
    ToolFormat.DEEPSEEK_V32: _dsml("function_calls", ""),
    ToolFormat.DEEPSEEK_V4: _dsml("tool_calls", ""),
    ToolFormat.DEEPSEEK_V41: _dsml(" calls", " "),
    # It shows the call's id, which includes the name.
    ToolFormat.KIMI_K2: rf"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>\s*{_ARGUMENTS}",
    ToolFormat.PHI4_MINI_JSON: rf"functools\s*\[\s*{_CALL_OBJECT}",
    ToolFormat.GLM45: rf"<tool_call>\s*{PROBE}\s*<arg_key>\s*{KEY}",
    ToolFormat.QWEN3_CODER: rf"<tool_call>\s*<function={PROBE}>\s*<parameter={KEY}>",
    ToolFormat.SEED_OSS: rf"<seed:tool_call>\s*<function={PROBE}>\s*<parameter={KEY}>",
    ToolFormat.MINIMAX_M2: (
        rf'<minimax:tool_call>\s*<invoke name="{PROBE}">\s*<parameter name="{KEY}">'
    ),
    ToolFormat.PYTHONIC: rf"\[\s*{PROBE}\(\s*{KEY}\s*=",
    ToolFormat.FUNCTIONGEMMA: rf"<start_function_call>\s*call:{PROBE}\{{\s*{KEY}",
    ToolFormat.GEMMA4: rf"<\|tool_call>\s*call:{PROBE}\{{\s*{KEY}",
    ToolFormat.OPENAI: rf"to=functions\.{PROBE}[^{{]*<\|message\|>\s*{_ARGUMENTS}",
    ToolFormat.LLAMA3_JSON: (
        rf'(?<!<tool_call>)\{{\s*"name":\s*"{PROBE}",\s*"parameters":\s*{_ARGUMENTS}'
    ),
}
# Where the markers of reasoning are several tokens.
_REASONING_TOKENS: Mapping[ReasoningFormat, tuple[str, ...]] = {
    ReasoningFormat.OPENAI: _HARMONY,
    ReasoningFormat.GEMMA4: ("<|channel>", "<channel|>"),
}


def markers(tool_format: str | None, reasoning_format: str | None) -> tuple[str, ...]:
    """Returns the texts that frame calls and reasoning; the output's text shows them also where
    they are special tokens."""
    tool, reasoning = tool_format_of(tool_format), reasoning_format_of(reasoning_format)
    of_calls = () if tool is None else _TOOL_MARKERS.get(tool, ())
    if reasoning is None:
        return of_calls
    opening, closing = REASONING_MARKERS[reasoning]
    of_reasoning = _REASONING_TOKENS.get(reasoning, (*opening, *closing))
    of_answer = ANSWER_MARKERS.get(reasoning, ())
    return tuple(dict.fromkeys((*of_calls, *of_reasoning, *of_answer)))

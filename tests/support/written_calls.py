"""Calls as the models of each format write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

Calls = Sequence[tuple[str, str]]  # names, and arguments as JSON


def _objects(calls: Calls, member: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{member}": {arguments}}}' for name, arguments in calls]


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in _objects(calls))


def _llama3(calls: Calls) -> str:
    return "; ".join(_objects(calls, "parameters"))


def _mistral_list(calls: Calls) -> str:
    return f"[TOOL_CALLS] [{', '.join(_objects(calls))}]"


def _mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def _deepseek_v3(calls: Calls) -> str:
    texts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    texts = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def _kimi_k2(calls: Calls) -> str:
    texts = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def _granite(calls: Calls) -> str:
    return f"<|tool_call|>[{', '.join(_objects(calls))}]"


def _phi4_mini(calls: Calls) -> str:
    return f"functools[{', '.join(_objects(calls))}]"


def _cohere(calls: Calls) -> str:
    texts = (
        f'{{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}'
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[{', '.join(texts)}]<|END_ACTION|>"


def _hunyuan(calls: Calls) -> str:
    return f"<tool_calls>[{', '.join(_objects(calls))}]</tool_calls>"


def _harmony(calls: Calls) -> str:
    """One call ends a turn; a second one is none of this turn."""
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
        for name, arguments in calls
    )


def _texts(arguments: str) -> list[tuple[str, str]]:
    """Names and values of arguments, texts without quotes."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in json.loads(arguments).items()
    ]


def _glm45(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in _texts(arguments)
        )
        texts.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(texts)


def _qwen3_coder(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _texts(arguments)
        )
        texts.append(f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>")
    return "\n".join(texts)


def _seed_oss(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = "".join(
            f"<parameter={key}>{value}</parameter>\n" for key, value in _texts(arguments)
        )
        call = f"<function={name}>\n{pairs}</function>"
        texts.append(f"<seed:tool_call>\n{call}\n</seed:tool_call>")
    return "\n".join(texts)


def _nemotron(calls: Calls) -> str:
    return f"<TOOLCALL>[{', '.join(_objects(calls))}]</TOOLCALL>"


def _minimax_m2(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = "".join(
            f'<parameter name="{key}">{value}</parameter>\n' for key, value in _texts(arguments)
        )
        texts.append(f'<invoke name="{name}">\n{pairs}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def _dsml(calls: Calls, section: str, space: str) -> str:
    mark, texts = "｜DSML｜", []
    for name, arguments in calls:
        pairs = "".join(
            f'<{mark}{space}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</{mark}{space}parameter>\n"
            for key, value in json.loads(arguments).items()
        )
        texts.append(f'<{mark}{space}invoke name="{name}">\n{pairs}</{mark}{space}invoke>\n')
    return f"<{mark}{section}>\n{''.join(texts)}</{mark}{section}>"


def _deepseek_v32(calls: Calls) -> str:
    return _dsml(calls, "function_calls", "")


def _deepseek_v4(calls: Calls) -> str:
    return _dsml(calls, "tool_calls", "")


def _deepseek_v41(calls: Calls) -> str:
    return _dsml(calls, " calls", " ")


def _pythonic(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = (f"{key}={json.dumps(value)}" for key, value in json.loads(arguments).items())
        texts.append(f"{name}({', '.join(pairs)})")
    return f"[{', '.join(texts)}]"


def _gemma(calls: Calls, opening: str, closing: str, quote: str) -> str:
    texts = []
    for name, arguments in calls:
        pairs = (
            f"{key}:{quote}{value}{quote}" if isinstance(value, str) else f"{key}:{value}"
            for key, value in json.loads(arguments).items()
        )
        texts.append(f"{opening}call:{name}{{{','.join(pairs)}}}{closing}")
    return "".join(texts)


def _functiongemma(calls: Calls) -> str:
    return _gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>")


def _gemma4(calls: Calls) -> str:
    return _gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>')


# By the name of a family in tests.support.tool_templates; `hermes` and `llama3` of tool_models.
WRITTEN: Mapping[str, Callable[[Calls], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral-list": _mistral_list,
    "mistral-named": _mistral_named,
    "magistral": _mistral_named,
    "deepseek-v3": _deepseek_v3,
    "deepseek-r1": _deepseek_v3,
    "deepseek-v31": _deepseek_v31,
    "deepseek-v32": _deepseek_v32,
    "deepseek-v4": _deepseek_v4,
    "deepseek-v41": _deepseek_v41,
    "kimi-k2": _kimi_k2,
    "granite": _granite,
    "granite-thinking": _granite,
    "granite33": _granite,
    "phi4-mini": _phi4_mini,
    "hunyuan": _hunyuan,
    "cohere": _cohere,
    "glm": _glm45,
    "qwen3-coder": _qwen3_coder,
    "seed-oss": _seed_oss,
    "nemotron": _nemotron,
    "minimax": _minimax_m2,
    "llama4": _pythonic,
    "functiongemma": _functiongemma,
    "gemma4": _gemma4,
    "gpt-oss": _harmony,
}

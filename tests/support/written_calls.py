"""Calls as the models of each format write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Calls = Sequence[tuple[str, str]]  # names, and arguments as JSON


def _objects(calls: Calls, member: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{member}": {arguments}}}' for name, arguments in calls]


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


def _hunyuan(calls: Calls) -> str:
    return f"<tool_calls>[{', '.join(_objects(calls))}]</tool_calls>"


def _harmony(calls: Calls) -> str:
    """One call ends a turn; a second one is none of this turn."""
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
        for name, arguments in calls
    )


# By the name of a family in tests.support.tool_templates.
WRITTEN: Mapping[str, Callable[[Calls], str]] = {
    "mistral-list": _mistral_list,
    "mistral-named": _mistral_named,
    "magistral": _mistral_named,
    "deepseek-v3": _deepseek_v3,
    "deepseek-r1": _deepseek_v3,
    "deepseek-v31": _deepseek_v31,
    "kimi-k2": _kimi_k2,
    "granite": _granite,
    "granite-thinking": _granite,
    "phi4-mini": _phi4_mini,
    "hunyuan": _hunyuan,
    "gpt-oss": _harmony,
}

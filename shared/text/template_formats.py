"""Finds the formats of a model's tool calls and reasoning by probing its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shared.messages import InvalidParameter
from shared.text.base import ChatTemplate
from shared.text.tool_formats import (
    KEY,
    PROBE,
    WRITTEN_CALLS,
    ReasoningFormat,
    ToolFormat,
)

_CALL_ID = "call00001"  # nine letters and digits: what Mistral's templates insist on
_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "probe",
        # Some templates refuse a property without a description.
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "probe"}},
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": _CALL_ID,
            "type": "function",
            "function": {"name": PROBE, "arguments": {KEY: "x"}},
        }
    ],
}
_USER = {"role": "user", "content": "probe"}
_RESULT = {"role": "tool", "tool_call_id": _CALL_ID, "name": PROBE, "content": "ok"}

_WRITTEN = {form: re.compile(pattern) for form, pattern in WRITTEN_CALLS.items()}
# For templates that describe calls to the model, and omit earlier calls or write them otherwise.
_DESCRIBED: Mapping[str, ToolFormat] = {
    "functools[": ToolFormat.PHI4_MINI_JSON,
    "<|tool_call|>": ToolFormat.GRANITE,
}
# For templates that do not describe calls: the format that the family is trained on.
_OF_MODEL_TYPE: Mapping[str, ToolFormat] = {
    "deepseek_v32": ToolFormat.DEEPSEEK_V32,
    "deepseek_v4": ToolFormat.DEEPSEEK_V4,
    "gemma4": ToolFormat.GEMMA4,
    "glm4_moe": ToolFormat.GLM45,
    "gpt_oss": ToolFormat.OPENAI,
    "kimi_k2": ToolFormat.KIMI_K2,
    "granite": ToolFormat.GRANITE,
    "granitemoe": ToolFormat.GRANITE,
    "hunyuan_v1_moe": ToolFormat.HUNYUAN_A13B,
    "llama4": ToolFormat.PYTHONIC,
    "minimax_m2": ToolFormat.MINIMAX_M2,
    "mistral": ToolFormat.MISTRAL,
    "mistral3": ToolFormat.MISTRAL,
    "ministral": ToolFormat.MISTRAL,
    "mixtral": ToolFormat.MISTRAL,
}


def shows_tools(template: ChatTemplate) -> bool:
    """Returns whether the tools of a request reach the prompt."""
    return PROBE in _rendered(template, [_USER], [_TOOL])


def find_tool_format(template: ChatTemplate, model_type: str = "") -> ToolFormat | None:
    """Returns the format in which the template writes earlier calls; TEXT for an unknown one, and
    None for a template without tools. The model was trained on its template's format.

    A template that leaves earlier calls out may describe the format to the model, and families
    without either have theirs by `model_type`, of config.json.
    """
    if not shows_tools(template):
        return None
    for tools in ([_TOOL], None):
        text = _rendered(template, [_USER, _CALL, _RESULT], tools)
        for tool_format, written in _WRITTEN.items():
            if written.search(text):
                return tool_format
    shown = _rendered(template, [_USER], [_TOOL])
    described = (found for sign, found in _DESCRIBED.items() if sign in shown)
    return next(described, _OF_MODEL_TYPE.get(model_type, ToolFormat.TEXT))


# One of these is in every template that knows the format.
_REASONING_SIGNS = {
    ReasoningFormat.OPENAI: ("<|channel|>analysis",),
    ReasoningFormat.GEMMA4: ("<channel|>",),
    ReasoningFormat.COHERE_COMMAND3: ("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat.SEED_OSS: ("</seed:think>",),
    ReasoningFormat.MISTRAL: ("[THINK]", "[/THINK]"),
    ReasoningFormat.GRANITE: ("Here is my response:",),
    ReasoningFormat.GRANITE33: ("<response></response>",),
    ReasoningFormat.HUNYUAN_A13B: ("</answer>",),
    ReasoningFormat.THINK: ("<think>", "</think>"),
}


def find_reasoning_format(sources: Mapping[str, str]) -> ReasoningFormat | None:
    """Returns the format whose markers one of the templates (`sources`, by name) writes, or cuts
    out of the assistant's messages: its model may write them."""
    for reasoning_format, signs in _REASONING_SIGNS.items():
        if any(sign in source for source in sources.values() for sign in signs):
            return reasoning_format
    return None


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """Returns '' where the template refuses."""
    try:
        return template.render(messages, tools=tools, add_generation_prompt=False)
    except InvalidParameter:
        return ""

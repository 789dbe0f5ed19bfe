"""Requests that are refused with 400, as tables: of every dialect, and of one.

A row of BAD_EVERYWHERE is a parameter, values that are refused, and the error's code. A dialect
that lacks the parameter refuses it as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PLAIN, TOOLS_ONLY, ENFORCED = "plain", "tools-only", "enforced"  # models
MESSAGES = [{"role": "user", "content": "hi"}]

UNSUPPORTED = "unsupported_parameter"
NO_STRUCTURE = "structured_output_not_supported"
MISSING = "missing_required_parameter"
TOO_LONG = "context_length_exceeded"

BAD_EVERYWHERE: list[tuple[str, list[Any], str | None]] = [
    ("model", [7], None),
    ("temperature", [-0.1, "hot", True, 3, 10**400], None),
    ("top_p", [1.1, -1, "x"], None),
    ("top_k", [-2, 1.5], None),
    ("min_p", [2, -0.1], None),
    ("presence_penalty", [3, "x"], None),
    ("frequency_penalty", [-3], None),
    ("repetition_penalty", [0], None),
    ("max_tokens", [0, -1, 1.5, "many"], None),
    ("stop", [[""], 7, ["a"] * 65, ["a" * 512] * 17], None),
    ("stop_token_ids", [[10**6], [-1]], None),
    ("min_tokens", [5], None),
    ("seed", [2**70, "x"], None),
    ("logit_bias", [{"a": 1}, {"9999999": 1}, {"1": 101}, {"1": "x"}], None),
    ("on_disconnect", ["explode"], None),
    ("durability", ["maybe"], None),
    ("priority", [-1, 7, 9], None),
    ("queue_timeout", [0, 0.09, -1, 86_401, "5", True, [1]], None),
    ("service_tier", ["priority"], UNSUPPORTED),
    ("stream", ["yes"], None),
    ("stream_interval", [0, 5000], None),
    ("no_such_parameter", [1], UNSUPPORTED),
]


@dataclass(frozen=True)
class Bad:
    """A request that is refused: what it has beside, or in place of, a good one's parameters."""

    params: dict[str, Any]
    param: str  # that the error names
    code: str | None = None
    model: str = PLAIN
    message: str = ""  # a pattern in the sentence


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def function(**members: Any) -> dict[str, Any]:
    return {"type": "function", "function": members}


def calls(*tool_calls: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": list(tool_calls)}]}


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [function(name="get_weather", parameters=CITY), function(name="now")]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
FORMAT_SCHEMA = "response_format.json_schema.schema"
GATE = {"type": "object", "properties": {"gate": {"type": "integer"}}}
DEPTH = {"name": "depth", "input_schema": GATE}

BAD_CHATS = [
    Bad({"messages": None}, "messages", MISSING),
    Bad({"messages": []}, "messages"),
    Bad({"messages": "hi"}, "messages"),
    Bad({"messages": [1]}, "messages.0"),
    Bad({"messages": [{"content": "hi"}]}, "messages.0.role", MISSING),
    Bad({"messages": [{"role": 7, "content": "hi"}]}, "messages.0.role"),
    Bad({"messages": [*MESSAGES, {"role": "robot", "content": "x"}]}, "messages.1.role"),
    Bad({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", MISSING),
    Bad({"messages": [{"role": "user"}]}, "messages.0.content", MISSING),
    Bad({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    Bad(content(), "messages.0.content"),
    Bad(content(1), "messages.0.content.0"),
    Bad(
        content({"type": "image_url", "image_url": {}}),
        "messages.0.content.0",
        "image_not_supported",
    ),
    Bad({"messages": [{**MESSAGES[0], "tool_calls": [{}]}]}, "messages.0.tool_calls", UNSUPPORTED),
    Bad({"model": None}, "model", MISSING),
    Bad({"max_completion_tokens": 0}, "max_completion_tokens"),
    Bad({"top_logprobs": 2}, "top_logprobs"),
    Bad({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    Bad({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    Bad({"stream_options": {"include_usage": True}}, "stream_options"),
    Bad({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", UNSUPPORTED),
    Bad({"stream_interval": 8}, "stream_interval"),
    Bad({"n": 0}, "n"),
    Bad({"n": 129}, "n"),
    Bad({"functions": [{}]}, "functions", UNSUPPORTED),
    Bad({"functions": [{"name": "a"}]}, "functions", UNSUPPORTED, TOOLS_ONLY),
    Bad({"function_call": {"name": "a"}}, "function_call", UNSUPPORTED, TOOLS_ONLY),
    Bad({"audio": {}}, "audio", UNSUPPORTED),
    Bad({"store": "yes"}, "store"),
    Bad({"reasoning_effort": 5}, "reasoning_effort"),
    Bad({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    Bad({"service_tier": "flex", "priority": 1}, "priority"),
    # Tools.
    Bad({"tools": [{"type": "function"}]}, "tools.0.function", MISSING),
    Bad({"tools": [function(name="f")]}, "tools", "tools_not_supported"),
    Bad({"tools": [5]}, "tools.0", None, TOOLS_ONLY),
    Bad(
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        "tools.0.type",
        UNSUPPORTED,
        TOOLS_ONLY,
    ),
    Bad({"tools": [{"type": "function"}]}, "tools.0.function", MISSING, TOOLS_ONLY),
    Bad({"tools": [function()]}, "tools.0.function.name", MISSING, TOOLS_ONLY),
    Bad({"tools": [function(name="a b")]}, "tools.0.function.name", None, TOOLS_ONLY),
    Bad({"tools": [TOOLS[1], TOOLS[1]]}, "tools.1.function.name", None, TOOLS_ONLY),
    Bad({"tools": [TOOLS[1]] * 1025}, "tools", None, TOOLS_ONLY),
    Bad(
        {"tools": [function(name="a", parameters=[])]},
        "tools.0.function.parameters",
        None,
        TOOLS_ONLY,
    ),
    Bad(
        {"tools": [function(name="a", parameters={"type": "array"})]},
        "tools.0.function.parameters.type",
        None,
        TOOLS_ONLY,
    ),
    Bad({"tools": [function(name="a", strict="yes")]}, "tools.0.function.strict", None, TOOLS_ONLY),
    Bad({"tools": [function(name="a", x=1)]}, "tools.0.function.x", UNSUPPORTED, TOOLS_ONLY),
    Bad({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", None, TOOLS_ONLY),
    Bad(
        {"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type", UNSUPPORTED, TOOLS_ONLY
    ),
    Bad(
        {"tools": TOOLS, "tool_choice": function(name="rm")},
        "tool_choice.function.name",
        None,
        TOOLS_ONLY,
    ),
    Bad({"tool_choice": "required"}, "tool_choice", None, TOOLS_ONLY),
    Bad({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", None, TOOLS_ONLY),
    Bad(
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages.0.tool_call_id",
        MISSING,
        TOOLS_ONLY,
    ),
    Bad(
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "unknown"}]},
        "messages.0.tool_call_id",
        None,
        TOOLS_ONLY,
    ),
    Bad(
        {"messages": [{"role": "function", "content": "x", "name": "f"}]},
        "messages.0.role",
        UNSUPPORTED,
        TOOLS_ONLY,
    ),
    Bad(
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        "messages.0.tool_calls",
        None,
        TOOLS_ONLY,
    ),
    Bad(calls({}), "messages.0.tool_calls.0.id", MISSING, TOOLS_ONLY),
    Bad(
        calls({"id": "a", **function(name="f", arguments={})}),
        "messages.0.tool_calls.0.function.arguments",
        None,
        TOOLS_ONLY,
    ),
    Bad({"messages": [{"role": "assistant"}]}, "messages.0.content", MISSING, TOOLS_ONLY),
    # Reasoning.
    Bad({"reasoning_effort": ["high"]}, "reasoning_effort", None, TOOLS_ONLY),
    # Structured output.
    Bad({"response_format": {"type": "json_object"}}, "response_format", NO_STRUCTURE),
    Bad({"response_format": SCHEMA}, FORMAT_SCHEMA, NO_STRUCTURE, TOOLS_ONLY),
    Bad({"guided_regex": "a"}, "guided_regex", NO_STRUCTURE, TOOLS_ONLY),
    Bad(
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        MISSING,
        ENFORCED,
    ),
    Bad(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
        "response_format.json_schema.name",
        None,
        ENFORCED,
        "1,64",
    ),
    Bad(
        {"response_format": {**SCHEMA, "json_schema": {"name": "x", "schema": {"not": {}}}}},
        FORMAT_SCHEMA,
        None,
        ENFORCED,
        "'not'",
    ),
    Bad({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", None, ENFORCED, "does not exist"),
    Bad({"guided_regex": "(?<=a)b"}, "guided_regex", None, ENFORCED, "look-around"),
    Bad({"guided_grammar": "start: nothing"}, "guided_grammar", None, ENFORCED, "nothing"),
    Bad(
        {"guided_regex": "a", "guided_choice": ["a"]},
        "guided_choice",
        None,
        ENFORCED,
        "guided_regex",
    ),
]

BAD_COMPLETIONS = [
    Bad({"prompt": None}, "prompt", MISSING),
    Bad({"prompt": ""}, "prompt"),
    Bad({"prompt": []}, "prompt"),
    Bad({"prompt": ["a", ""]}, "prompt.1"),
    Bad({"prompt": ["a", [2]]}, "prompt"),
    Bad({"prompt": ["a"] * 65}, "prompt"),
    Bad({"prompt": ["a"] * 33, "n": 4}, "prompt"),
    Bad({"prompt": ["a"] * 33, "best_of": 4}, "prompt"),
    Bad({"prompt": [1, "a"]}, "prompt"),
    Bad({"prompt": [10**6]}, "prompt"),
    Bad({"prompt": [[1], [10**6]]}, "prompt.1"),
    Bad({"prompt": [[-1]]}, "prompt.0"),
    Bad({"prompt": [True]}, "prompt.0"),
    Bad({"prompt": {"a": 1}}, "prompt"),
    Bad({"prompt": [1] * 600}, "prompt", TOO_LONG),
    Bad({"echo": True, "max_tokens": -1}, "max_tokens"),
    Bad({"logprobs": 6}, "logprobs"),
    Bad({"logprobs": True}, "logprobs"),
    Bad({"echo": True, "logprobs": 6}, "logprobs"),
    Bad({"prompt_logprobs": 21}, "prompt_logprobs"),
    Bad({"prompt_logprobs": -1}, "prompt_logprobs"),
    Bad({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    Bad({"n": 0}, "n"),
    Bad({"n": 129}, "n"),
    Bad({"n": 2, "best_of": 1}, "best_of"),
    Bad({"best_of": 129}, "best_of"),
    Bad({"best_of": 2, "stream": True}, "best_of"),
    Bad({"suffix": "x"}, "suffix", UNSUPPORTED),
    Bad({"messages": MESSAGES}, "messages", UNSUPPORTED),
    Bad({"stream_interval": 8}, "stream_interval"),
]

BAD_RESPONSES = [
    Bad({"conversation": "conv_1"}, "conversation", UNSUPPORTED),
    Bad({"prompt": {"id": "pmpt_1"}}, "prompt", UNSUPPORTED),
    Bad({"max_tool_calls": 0}, "max_tool_calls", UNSUPPORTED),
    Bad({"truncation": "middle"}, "truncation", UNSUPPORTED),
    Bad({"text": {"verbosity": "any"}}, "text.verbosity"),
    Bad({"include": ["everything"]}, "include.0", UNSUPPORTED),
    Bad({"tools": [{"type": "unheard_of"}]}, "tools.0.type", UNSUPPORTED),
    Bad({"background": True, "store": False}, "background"),
    Bad({"input": [{"type": "item_unknown", "id": "msg_1"}]}, "input.0.type", UNSUPPORTED),
    Bad({"input": []}, "input"),
    Bad({"n": 2}, "n", UNSUPPORTED),
    Bad({"messages": []}, "messages", UNSUPPORTED),
]

BAD_MESSAGES = [
    Bad({"temperature": 1.5}, "temperature"),
    Bad({"thinking": {"type": "endless"}}, "thinking.type", UNSUPPORTED),
    Bad({"tools": [DEPTH, DEPTH]}, "tools.1.name", None, TOOLS_ONLY),
]

BAD_GENERATES = [
    Bad({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    Bad({"prompt_logprobs": 99, "stream": False}, "prompt_logprobs"),
]

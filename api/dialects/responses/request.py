"""What a Responses request asks of the model, in the members of ChatInput.

The tools, the choice among them and the format of the text have the same members as in chat
completions, one level less deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from api.dialects.responses.formatter import ResponseFormatter
from api.dialects.responses.items import (
    Item,
    input_items,
)
from api.dialects.responses.protocol import (
    ResponseReasoning,
    ResponseRequest,
    check_request,
)
from api.dialects.responses.record import encode_facts, facts_of
from api.dialects.responses.store import (
    ResponseStore,
)
from api.errors import (
    MAX_ECHO_CHARS,
    renaming,
    unknown_parameter,
    unsupported,
)
from api.generation.chat_prompt import ChatInput, PreparedPrompt, prepare_prompt
from api.generation.models import ServedModel
from api.generation.priority import job_lane
from api.generation.response_size import ResponseSize
from api.generation.sampling import ContextBudget, renamed_parameters, sampling_params
from api.generation.service import GenerationService
from api.http.caller import Caller
from api.jobs.new_job import new_job, now_s
from shared.messages import InvalidParameter, Job, OnDisconnect, SamplingParams

Tool = Mapping[str, Any]

_FUNCTION = ("name", "description", "parameters", "strict")
_SCHEMA = ("name", "description", "schema", "strict")
# Members of a function tool that ask for nothing when they are so.
_INERT: Mapping[str, object] = {
    "allowed_callers": ["direct"],
    "async": False,
    "defer_loading": False,
}

# a member of ChatInput, as planning names it -> as this dialect does
_RENAMED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^tools\.(\d+)\.function"), r"tools.\1"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
    (re.compile(r"^tool_choice\.allowed_tools\.tools\.(\d+)\.function"), r"tool_choice.tools.\1"),
    (re.compile(r"^tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    # The messages are not the request's items: which of them it is would be a guess.
    (re.compile(r"^messages.*", re.DOTALL), "input"),
)


def chat_ask(request: ResponseRequest, items: Sequence[Item], job_id: str) -> ChatInput:
    """`items`: the whole conversation, the request's own last. Raises InvalidParameter."""
    _check_reasoning(request.reasoning)
    return ChatInput(
        messages=chat_messages(request.instructions, items),
        tools=[_chat_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text.format),
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning.effort,
        call_id_seed=job_id,
    )


def in_this_dialect() -> AbstractContextManager[None]:
    """Errors of planning name the members that the caller sent."""
    return renaming(_RENAMED)


def _check_reasoning(reasoning: ResponseReasoning) -> None:
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) is not None:
            raise InvalidParameter(
                f"reasoning.{name}", "must be 'auto', 'concise' or 'detailed', and changes nothing"
            )
    for name in ("context", "mode"):
        if getattr(reasoning, name) is not None:
            raise unsupported(f"reasoning.{name}", "it cannot be set")


def _chat_tool(tool: Tool, path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        echoed = str(kind)[:MAX_ECHO_CHARS]
        raise unsupported(
            f"{path}.type", f"tools of type '{echoed}' are not served, only 'function'"
        )
    function: dict[str, Any] = {}
    for name, value in tool.items():
        if name in _FUNCTION:
            if value is not None:
                function[name] = value
        elif name != "type" and value is not None and value != _INERT.get(name):
            raise unknown_parameter(f"{path}.{name}")
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "function":
        _only(choice, "tool_choice", "type", "name")
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind != "allowed_tools":
        echoed = str(kind)[:MAX_ECHO_CHARS]
        raise unsupported("tool_choice.type", f"choices of type '{echoed}' are not served")
    _only(choice, "tool_choice", "type", "mode", "tools")
    tools = choice.get("tools")
    if not isinstance(tools, list):
        raise InvalidParameter("tool_choice.tools", "must be a list of tools")
    allowed = [_allowed(tool, f"tool_choice.tools.{n}") for n, tool in enumerate(tools)]
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": choice.get("mode"), "tools": allowed},
    }


def _allowed(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidParameter(path, "must be an object of type 'function'")
    return {"type": "function", "function": {"name": tool.get("name")}}


def _response_format(text_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if text_format is None:
        return None
    kind = text_format.get("type")
    if kind == "text":
        _only(text_format, "text.format", "type")
        return None
    if kind != "json_schema":
        return dict(text_format)
    _only(text_format, "text.format", "type", *_SCHEMA)
    schema = {name: text_format[name] for name in _SCHEMA if text_format.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _only(value: Mapping[str, Any], path: str, *names: str) -> None:
    for name in value:
        if name not in names:
            raise unknown_parameter(f"{path}.{name}")


# From items to the messages that chat templates know.
#
# An assistant message may be several items: its reasoning, its text, the tools it
# called. Templates know one message with all three, so items that follow one another become one.

_ASSISTANT_ITEMS = frozenset({"reasoning", "function_call"})


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation in the members of chat completions. `items` are kept ones."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None
    names: dict[str, str] = {}  # id of a call -> name of its tool
    for item in items:
        if not _is_assistants(item):
            turn = None
            messages.append(_message(item, names))
            continue
        if turn is None or not _fits(turn, item):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        _add(turn, item)
        if item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
    return messages


def check_calls(earlier: Sequence[Item], items: Sequence[Item]) -> None:
    """Every output needs a call before it, in `earlier` or in the request itself.

    Raises InvalidParameter.
    """
    call_ids = set(_call_ids(earlier))
    for index, item in enumerate(items):
        if item["type"] == "function_call":
            call_ids.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in call_ids:
            raise InvalidParameter(
                f"input.{index}.call_id", "no function call with this call_id comes before it"
            )


def _call_ids(items: Sequence[Item]) -> Iterator[str]:
    return (item["call_id"] for item in items if item["type"] == "function_call")


def _is_assistants(item: Item) -> bool:
    return item["type"] in _ASSISTANT_ITEMS or item.get("role") == "assistant"


def _fits(turn: dict[str, Any], item: Item) -> bool:
    """Thoughts come first, then one message, then any number of calls."""
    if item["type"] == "function_call":
        return True
    if item["type"] == "message":
        return not turn["content"] and "tool_calls" not in turn
    return turn.keys() == {"role", "content"} and not turn["content"]


def _add(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _content(item["content"])
    elif item["type"] == "reasoning":
        parts = item.get("content") or item["summary"]
        if parts:
            turn["reasoning_content"] = "\n".join(part["text"] for part in parts)
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _message(item: Item, names: dict[str, str]) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _content(item["content"])}
    message = {
        "role": "tool",
        "tool_call_id": item["call_id"],
        "content": _content(item["output"]),
    }
    if item["call_id"] in names:
        message["name"] = names[item["call_id"]]
    return message


def _content(content: str | Sequence[Item]) -> str | list[dict[str, str]]:
    """Text, or text parts where there are several."""
    if isinstance(content, str):
        return content
    texts = [part["refusal"] if part["type"] == "refusal" else part["text"] for part in content]
    if len(texts) == 1:
        return str(texts[0])
    return [{"type": "text", "text": text} for text in texts]


# SamplingParams of a Responses request: those of chat completions under their names here.


def response_sampling(request: ResponseRequest, budget: ContextBudget) -> SamplingParams:
    """Raises InvalidParameter. The default of max_output_tokens is all the context has left."""
    logprobs = request.top_logprobs or 0 if request.wants_logprobs else None
    with renamed_parameters({"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}):
        max_tokens = budget.max_tokens(request.max_output_tokens, budget.left)
        return sampling_params(request, max_tokens, logprobs, None, budget)


async def prepare_response(
    generation: GenerationService, responses: ResponseStore, caller: Caller, params: ResponseRequest
) -> tuple[Job, ResponseFormatter]:
    """Everything but the answer. Raises ApiError and InvalidParameter."""
    check_request(params)
    model = await generation.models.require(params.model)
    _sampling(generation, params, model.budget())  # before the prompt is read
    lane = job_lane(params)
    assert caller.job_id is not None, "this route makes jobs"
    earlier = await responses.earlier_items(caller.tenant, params.previous_response_id)
    items, plan = await generation.pool.run(_planned, model, params, earlier, caller.job_id)
    budget = model.budget(len(plan.token_ids))
    budget.check_prompt("input")
    job = new_job(
        caller,
        generation.job_defaults,
        model=model.card.name,
        kind=ResponseFormatter.kind,
        token_ids=plan.token_ids,
        sampling=replace(_sampling(generation, params, budget), grammar=plan.grammar),
        on_disconnect=OnDisconnect.CONTINUE if params.background else OnDisconnect.CANCEL,
        queue_timeout_s=params.queue_timeout,
        durability=params.durability,
        lane=lane,
    )
    facts = facts_of(params, model.card, plan.new_parser, items, now_s(), job.sampling)
    if params.store:
        job = replace(job, facts=encode_facts(facts), retain_ms=responses.retain_ms)
    return job, ResponseFormatter(facts, job.job_id, model.text.tokenizer)


def _sampling(
    generation: GenerationService, params: ResponseRequest, budget: ContextBudget
) -> SamplingParams:
    sampling = response_sampling(params, budget)
    size = ResponseSize(
        max_tokens=("max_output_tokens", params.max_output_tokens),
        logprobs=("top_logprobs", sampling.logprobs),
    )
    return size.fitted(sampling, generation.max_response_bytes)


def _planned(
    model: ServedModel, params: ResponseRequest, earlier: Sequence[Item], job_id: str
) -> tuple[list[Item], PreparedPrompt]:
    """Returns the request's items, and what the whole conversation needs from the model.

    Raises InvalidParameter. Ten thousand items take some tens of milliseconds.
    """
    items = input_items(params.input, job_id)
    check_calls(earlier, items)
    ask = chat_ask(params, [*earlier, *items], job_id)
    with in_this_dialect():
        return items, prepare_prompt(model, ask)

"""From a Responses request to a job and the formatter of its response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from api.dialects.responses.formatter import ResponseFormatter
from api.dialects.responses.items import Item, input_items
from api.dialects.responses.protocol import (
    FunctionTool,
    ResponseReasoning,
    ResponseRequest,
    TextFormat,
    ToolChoiceFunction,
    check_request,
)
from api.dialects.responses.record import encode_request, stored_request
from api.dialects.responses.store import ResponseStore
from api.errors import unsupported
from api.generation.grammars import RequestedGrammar, object_output, schema_output
from api.generation.ignored_parameters import report_ignored
from api.generation.messages import MAX_CALLS
from api.generation.models import GenerationService, ServedModel
from api.generation.prompt import ChatInput, PreparedPrompt, prepare_prompt
from api.generation.protocol import job_lane
from api.generation.sampling import ContextBudget, ResponseSize, renamed_parameters, sampling_params
from api.generation.tools import NO_PARAMETERS, Tool, Toolbox, ToolUse
from api.http.caller import Caller
from api.jobs.new_job import new_job, now_s
from shared.messages import InvalidParameter, Job, OnDisconnect, SamplingParams

# a parameter of chat completions -> what this dialect calls it
PARAM_NAMES = {
    "reasoning_effort": "reasoning.effort",
    # The messages are not the request's items: which of them it is would be a guess.
    "messages": "input",
}


def chat_input(request: ResponseRequest, items: Sequence[Item], call_id_seed: str) -> ChatInput:
    """Returns what the prompt is made of. `items`: the whole conversation, the request's own last.

    CPU-bound for long conversations: run it in the thread pool. Raises InvalidParameter.
    """
    _check_reasoning(request.reasoning)
    return ChatInput(
        messages=chat_messages(request.instructions, items),
        tool_use=_tool_use(request),
        output=_output(request.text.format),
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning.effort,
        call_id_seed=call_id_seed,
    )


def _check_reasoning(reasoning: ResponseReasoning) -> None:
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) is not None:
            raise InvalidParameter(
                f"reasoning.{name}", "must be 'auto', 'concise' or 'detailed', and changes nothing"
            )
    for name in ("context", "mode"):
        if getattr(reasoning, name) is not None:
            raise unsupported(f"reasoning.{name}", "it cannot be set")


def _tool_use(request: ResponseRequest) -> ToolUse:
    tools = (_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools))
    toolbox = Toolbox(tools, parallel=request.parallel_tool_calls)
    choice = request.tool_choice
    if isinstance(choice, str):
        return toolbox.use(choice)
    if isinstance(choice, ToolChoiceFunction):
        return toolbox.use_one(choice.name, "tool_choice.name")
    names = [
        (tool.name, f"tool_choice.tools.{index}.name") for index, tool in enumerate(choice.tools)
    ]
    return toolbox.use_some(names, must_call=choice.mode == "required")


def _tool(tool: FunctionTool, param: str) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters or NO_PARAMETERS,
        strict=bool(tool.strict),
        param=param,
        schema_param=f"{param}.parameters",
    )


def _output(text_format: TextFormat | None) -> RequestedGrammar | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return object_output("text.format")
    return schema_output(text_format.json_schema, "text.format.schema")


# From items to the messages that chat templates know.
#
# An assistant message may be several items: its reasoning, its text, the tools it
# called. Templates know one message with all three, so items that follow one another become one.

_ASSISTANT_ITEMS = frozenset({"reasoning", "function_call"})


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the conversation as chat templates know it. `items` are kept ones.

    Raises InvalidParameter for calls of one turn that are too many or have the same id.
    """
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
    """Checks that every output has a call before it, in `earlier` or in the request itself.

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
        calls = turn.setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS or any(call["id"] == item["call_id"] for call in calls):
            raise InvalidParameter(
                "input", f"calls in one turn have ids of their own, and are at most {MAX_CALLS}"
            )
        calls.append({"id": item["call_id"], "type": "function", "function": function})


def _message(item: Item, names: dict[str, str]) -> dict[str, Any]:
    if item["type"] == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        return {"role": role, "content": _content(item["content"])}
    return {
        "role": "tool",
        "content": _content(item["output"]),
        "tool_call_id": item["call_id"],
        "name": names[item["call_id"]],  # see `check_calls`
    }


def _content(content: str | Sequence[Item]) -> str | list[dict[str, str]]:
    """Returns text, or text parts where there are several."""
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
    """Makes the job and formatter of a request. Raises ApiError and InvalidParameter."""
    check_request(params)
    model = await generation.models.require(params.model)
    _sampling(generation, params, model.budget())  # before the prompt is read
    lane = job_lane(params)
    assert caller.job_id is not None, "this route makes jobs"
    earlier = await responses.earlier_items(caller.tenant, params.previous_response_id)
    items, prompt = await generation.pool.run(_prompt, model, params, earlier, caller.job_id)
    budget = model.budget(len(prompt.token_ids))
    budget.check_prompt("input")
    report_ignored(prompt.ignored, PARAM_NAMES)
    budget.report_clipped("max_output_tokens", params.max_output_tokens)
    job = new_job(
        caller,
        generation.job_defaults,
        model=model.card.name,
        kind=ResponseFormatter.kind,
        token_ids=prompt.token_ids,
        sampling=replace(_sampling(generation, params, budget), grammar=prompt.grammar),
        on_disconnect=OnDisconnect.CONTINUE if params.background else OnDisconnect.CANCEL,
        queue_timeout_s=params.queue_timeout,
        durability=params.durability,
        lane=lane,
    )
    stored = stored_request(
        params, model.card, prompt.new_parser.config, items, now_s(), job.sampling
    )
    if params.store:
        job = replace(job, request_record=encode_request(stored), retain_ms=responses.retain_ms)
    return job, ResponseFormatter(stored, job.job_id, model.text.tokenizer)


def _sampling(
    generation: GenerationService, params: ResponseRequest, budget: ContextBudget
) -> SamplingParams:
    sampling = response_sampling(params, budget)
    size = ResponseSize(
        max_tokens=("max_output_tokens", params.max_output_tokens),
        logprobs=("top_logprobs", sampling.logprobs),
    )
    return size.fitted(sampling, generation.max_response_bytes)


def _prompt(
    model: ServedModel, params: ResponseRequest, earlier: Sequence[Item], job_id: str
) -> tuple[list[Item], PreparedPrompt]:
    """Returns the request's items, and what the whole conversation needs from the model.

    Raises InvalidParameter. Ten thousand items take some tens of milliseconds.
    """
    items = input_items(params.input, job_id)
    check_calls(earlier, items)
    chat = chat_input(params, [*earlier, *items], job_id)
    with renamed_parameters(PARAM_NAMES):
        return items, prepare_prompt(model, chat)

"""From a Responses request to a job and the formatter of its response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from api.dialects.responses.calls import CUSTOM, FUNCTION, CallTarget, Item
from api.dialects.responses.conversation import SUMMARY_REQUEST, chat_messages, check_calls
from api.dialects.responses.formatter import ResponseFormatter
from api.dialects.responses.items import input_items, references
from api.dialects.responses.protocol import (
    ResponseReasoning,
    ResponseRequest,
    TextFormat,
    check_request,
)
from api.dialects.responses.record import encode_request, stored_request
from api.dialects.responses.shown_tools import (
    Shown,
    ShownTools,
    chosen_name,
    custom_grammars,
    offered_tools,
)
from api.dialects.responses.store import ResponseStore
from api.dialects.responses.tools import (
    HOSTED,
    NO_HOSTED,
    AllowedTool,
    ToolChoiceBuiltin,
    ToolChoiceHosted,
    ToolChoiceNamed,
    tools_of,
)
from api.generation.grammars import check_grammar, object_output, schema_output
from api.generation.ignored_parameters import report_ignored
from api.generation.models import GenerationService, ServedModel
from api.generation.prompt import ChatInput, PreparedPrompt, RequestedGrammar, prepare_prompt
from api.generation.protocol import job_lane
from api.generation.sampling import ContextBudget, ResponseSize, renamed_parameters, sampling_params
from api.generation.tools import Toolbox, ToolUse
from api.http.caller import Caller
from api.jobs.new_job import new_job, now_s
from api.request_errors import unsupported
from shared.messages import InvalidParameter, Job, OnDisconnect, SamplingParams

# a parameter of chat completions -> what this dialect calls it
PARAM_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "tools.function.parameters": "tools.parameters",
    # The messages are not the request's items: which of them it is would be a guess.
    "messages": "input",
}


def chat_input(
    request: ResponseRequest,
    items: Sequence[Item],
    call_id_seed: str,
    tools: ShownTools | None = None,
) -> ChatInput:
    """Returns what the prompt is made of. `items`: the whole conversation, the request's own last.
    `tools`: its tools, where they are known.

    CPU-bound for long conversations: run it in the thread pool. Raises InvalidParameter.
    """
    _check_reasoning(request.reasoning)
    tools = offered_tools(request.tools, items) if tools is None else tools
    messages = chat_messages(request.instructions, items, tools.found)
    tool_use, output = _tool_use(request, tools), _output(request.text.format)
    if request.is_compaction:
        messages.append({"role": "user", "content": SUMMARY_REQUEST})
        # They stay listed: the prefix of the conversation lasts.
        tool_use, output = ToolUse(tool_use.tools), None
    return ChatInput(
        messages=messages,
        tool_use=tool_use,
        output=output,
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


def _tool_use(request: ResponseRequest, tools: ShownTools) -> ToolUse:
    shown = tools.shown
    toolbox = Toolbox(
        (tool for tool, _ in shown), parallel=request.parallel_tool_calls, listed=tools.listed
    )
    choice = request.tool_choice
    if isinstance(choice, str):
        if choice == "required" and request.tools and not shown:
            raise unsupported("tool_choice", NO_HOSTED)
        return toolbox.use(choice)
    match choice:
        case ToolChoiceNamed():
            name = chosen_name(shown, choice.name, choice.namespace, "tool_choice.name")
            return toolbox.use_one(name, "tool_choice.name")
        case ToolChoiceBuiltin():
            return toolbox.use_one(choice.type, "tool_choice.type")
        case ToolChoiceHosted():
            raise unsupported("tool_choice", NO_HOSTED)
    names = [
        (
            _allowed_name(tool, shown, f"tool_choice.tools.{index}"),
            f"tool_choice.tools.{index}.name",
        )
        for index, tool in enumerate(choice.tools)
        if tool.type not in HOSTED
    ]
    if not names and choice.mode == "required":
        raise unsupported("tool_choice", NO_HOSTED)
    return toolbox.use_some(names, must_call=choice.mode == "required")


def _allowed_name(tool: AllowedTool, shown: Sequence[Shown], param: str) -> str:
    if tool.name is None:
        return tool.type  # a built-in tool
    return chosen_name(shown, tool.name, tool.namespace, param)


def _output(text_format: TextFormat | None) -> RequestedGrammar | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return object_output("text.format")
    return schema_output(text_format.json_schema, "text.format.schema")


# SamplingParams of a Responses request: those of chat completions under their names here.


def response_sampling(request: ResponseRequest, budget: ContextBudget) -> SamplingParams:
    """Raises InvalidParameter. The default of max_output_tokens is all the context has left."""
    logprobs = request.top_logprobs or 0 if request.wants_logprobs else None
    with renamed_parameters({"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}):
        max_tokens = budget.max_tokens(request.max_output_tokens, budget.left)
        return sampling_params(request, max_tokens, logprobs, None, budget)


async def prepare_response(
    generation: GenerationService,
    responses: ResponseStore,
    caller: Caller,
    params: ResponseRequest,
    formatter: type[ResponseFormatter] = ResponseFormatter,
) -> tuple[Job, ResponseFormatter]:
    """Makes the job and formatter of a request. Raises ApiError and InvalidParameter."""
    check_request(params)
    model = await generation.models.require(params.model)
    _sampling(generation, params, model.budget())  # before the prompt is read
    lane = job_lane(params)
    assert caller.job_id is not None, "this route makes jobs"
    earlier = await responses.earlier_items(caller.tenant, params.previous_response_id)
    referenced = await responses.referenced_items(caller.tenant, references(params.input))
    items, tools, prompt = await generation.pool.run(
        response_prompt, model, params, earlier, referenced, caller.job_id
    )
    budget = model.budget(len(prompt.token_ids))
    budget.check_prompt("input")
    _report_unkept(tools, prompt)
    budget.report_clipped("max_output_tokens", params.max_output_tokens)
    job = new_job(
        caller,
        generation.job_defaults,
        model=model,
        kind=ResponseFormatter.kind,
        token_ids=prompt.token_ids,
        sampling=replace(_sampling(generation, params, budget), grammar=prompt.grammar),
        on_disconnect=OnDisconnect.CONTINUE if params.background else OnDisconnect.CANCEL,
        params=params,
        lane=lane,
    )
    parser = prompt.new_parser.config
    calls = _call_targets(tools)
    stored = stored_request(params, model.card, parser, items, now_s(), job.sampling, calls)
    if params.store:
        retain_ms = responses.retain_ms if params.expires_after is None else job.retain_ms
        record = encode_request(stored, job.job_id)
        job = replace(job, request_record=record, retain_ms=retain_ms)
    return job, formatter(stored, job.job_id, model.text.tokenizer)


def _sampling(
    generation: GenerationService, params: ResponseRequest, budget: ContextBudget
) -> SamplingParams:
    sampling = response_sampling(params, budget)
    size = ResponseSize(
        max_tokens=("max_output_tokens", params.max_output_tokens),
        logprobs=("top_logprobs", sampling.logprobs),
    )
    return size.fitted(sampling, generation.max_response_bytes)


async def count_input_tokens(
    generation: GenerationService, responses: ResponseStore, caller: Caller, params: ResponseRequest
) -> int:
    """Returns the number of tokens that the prompt of a request has, whether it fits or not.
    Raises ApiError and InvalidParameter."""
    model = await generation.models.require(params.model)
    earlier = await responses.earlier_items(caller.tenant, params.previous_response_id)
    referenced = await responses.referenced_items(caller.tenant, references(params.input))

    read = partial(response_prompt, must_fit=False)
    _, tools, prompt = await generation.pool.run(read, model, params, earlier, referenced, "")
    _report_unkept(tools, prompt)
    return len(prompt.token_ids)


def _report_unkept(tools: ShownTools, prompt: PreparedPrompt) -> None:
    report_ignored(prompt.ignored, PARAM_NAMES)
    report_ignored(tools.unkept, why="the grammar cannot be enforced for this model")


def response_prompt(
    model: ServedModel,
    params: ResponseRequest,
    earlier: Sequence[Item],
    referenced: Mapping[str, Item],
    job_id: str,
    *,
    must_fit: bool = True,
) -> tuple[list[Item], ShownTools, PreparedPrompt]:
    """Returns the request's items, its tools, and what the whole conversation needs from the model.

    Raises InvalidParameter. Ten thousand items take some tens of milliseconds.
    """
    items = input_items(params.input, job_id, referenced)
    check_calls(earlier, items)
    whole = [*earlier, *items]
    enforced = model.card.structured_output
    tools = offered_tools(params.tools, whole, enforced=enforced)
    if enforced:
        _check_grammars(model, params, whole)
    with renamed_parameters(PARAM_NAMES):
        tools, prompt = _prepared(model, params, whole, tools, job_id, must_fit=must_fit)
    return items, tools, prompt


def _call_targets(tools: ShownTools) -> dict[str, CallTarget]:
    """Returns the targets of calls that do not become a function call of the same name."""
    return {
        tool.name: target
        for tool, target in tools.shown
        if target != CallTarget(FUNCTION, tool.name)
    }


def _prepared(
    model: ServedModel,
    params: ResponseRequest,
    items: Sequence[Item],
    tools: ShownTools,
    job_id: str,
    *,
    must_fit: bool,
) -> tuple[ShownTools, PreparedPrompt]:
    """Returns the tools and the prompt; where custom tools' grammars are too large for it all,
    without them."""
    try:
        chat = chat_input(params, items, job_id, tools)
        return tools, prepare_prompt(model, chat, must_fit=must_fit)
    except InvalidParameter as error:
        custom = [tool for tool, target in tools.shown if tool.strict and target.kind == CUSTOM]
        at_fault = {"tools", *(tool.schema_param for tool in custom)}
        if not custom or error.param not in at_fault:
            raise
    tools = offered_tools(params.tools, items, enforced=False)
    chat = chat_input(params, items, job_id, tools)
    return tools, prepare_prompt(model, chat, must_fit=must_fit)


def _check_grammars(model: ServedModel, params: ResponseRequest, items: Sequence[Item]) -> None:
    """Checks the grammars of custom tools, also of those that items bring."""
    brought = [
        custom_grammars(tools_of(item["tools"]), "input")
        for item in items
        if item["type"] in ("tool_search_output", "additional_tools")
    ]
    for grammar, param in chain(custom_grammars(params.tools, "tools"), *brought):
        check_grammar(model, RequestedGrammar(grammar, param))

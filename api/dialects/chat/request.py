"""From a chat request to a job and the formatter of its response."""

from __future__ import annotations

from dataclasses import replace

from api.dialects.chat.formatter import ChatFormatter
from api.dialects.chat.protocol import ChatRequest, ChatToolChoice, FunctionDefinition
from api.generation.formatter import ResponseContext, Timing, prompt_logprobs_bytes
from api.generation.ignored_parameters import report_ignored
from api.generation.messages import template_messages
from api.generation.models import GenerationService, ServedModel
from api.generation.prompt import ChatInput, PreparedPrompt, prepare_prompt, requested_grammar
from api.generation.protocol import job_lane, served_tier
from api.generation.sampling import (
    ContextBudget,
    ResponseSize,
    check_prompt_logprobs,
    renamed_parameters,
    sampling_params,
)
from api.generation.tools import NO_PARAMETERS, Tool, Toolbox, ToolUse
from api.http.caller import Caller
from api.jobs.new_job import Prepared, new_job, now_s
from api.on_demand import load_part
from shared.messages import MAX_CHOICES, InvalidParameter, SamplingParams


def chat_sampling(request: ChatRequest, budget: ContextBudget) -> SamplingParams:
    """Raises InvalidParameter. The default of max_tokens is all that the context has left."""
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise InvalidParameter("top_logprobs", "needs 'logprobs' to be true")
    check_prompt_logprobs(request.prompt_logprobs, streamed=request.stream)
    name, params = request.requested_tokens
    with renamed_parameters({"logprobs": "top_logprobs", "max_tokens": name}):
        max_tokens = budget.max_tokens(params, budget.left)
        return sampling_params(request, max_tokens, logprobs, request.prompt_logprobs, budget)


async def prepare_chat(
    generation: GenerationService, caller: Caller, chat: ChatRequest
) -> Prepared:
    """Makes the job and formatter of a request, or of a batch row.

    Raises ApiError and InvalidParameter.
    """
    model = await generation.models.require(chat.model)
    _sampling(generation, chat, model.budget())  # before the prompt is read
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidParameter(
            "continue_final_message", "needs 'add_generation_prompt' to be false"
        )
    lane = job_lane(chat)
    prompt = await generation.pool.run(_prompt, model, chat, caller.request_id)
    budget = model.budget(len(prompt.token_ids))
    budget.check_prompt("messages")
    report_ignored(prompt.ignored)
    budget.report_clipped(*chat.requested_tokens)
    job = new_job(
        caller,
        generation.job_defaults,
        model=model,
        kind=ChatFormatter.kind,
        token_ids=prompt.token_ids,
        sampling=replace(_sampling(generation, chat, budget), grammar=prompt.grammar),
        on_disconnect=chat.on_disconnect,
        params=chat,
        num_choices=chat.n,
        lane=lane,
    )
    timing = Timing()
    context = ResponseContext(
        id=caller.request_id,
        model=model.card.name,
        created_s=now_s(),
        num_choices=job.num_choices,
        include_usage=chat.include_usage,
        counted_prompt_tokens=len(prompt.token_ids) if chat.has_continuous_usage else None,
        num_logprobs=job.sampling.logprobs,
        prompt_token_ids=prompt.token_ids if chat.return_token_ids else None,
        service_tier=served_tier(chat),
        timing=timing if chat.return_metrics else None,
    )
    scored, shown = None, None
    if chat.prompt_logprobs is not None:
        logprobs = load_part("logprobs")
        scored = logprobs.scored_prompt(job)
        shown = logprobs.PromptLogprobs(scored, chat.prompt_logprobs, model.text.tokenizer).payload
    formatter = ChatFormatter(
        context,
        model.text.tokenizer,
        prompt.new_parser,
        counts_reasoning=prompt.counts_reasoning,
        prompt_logprobs=shown,
    )
    return Prepared(job, formatter, timing, scored)


def _prompt(model: ServedModel, chat: ChatRequest, call_id_seed: str) -> PreparedPrompt:
    return prepare_prompt(model, chat_input(chat, call_id_seed))


def chat_input(chat: ChatRequest, call_id_seed: str = "") -> ChatInput:
    """Returns what the prompt is made of. CPU-bound for large schemas and many messages: run it in
    the thread pool. Raises InvalidParameter."""
    return ChatInput(
        messages=template_messages(chat.messages),
        tool_use=_tool_use(chat),
        output=requested_grammar(chat),
        chat_template=chat.chat_template,
        chat_template_kwargs=chat.chat_template_kwargs,
        reasoning_effort=chat.reasoning_effort,
        call_id_seed=call_id_seed,
        add_generation_prompt=chat.add_generation_prompt,
        continues=chat.continue_final_message,
        thinking_budget=chat.thinking_token_budget,
    )


def _tool_use(chat: ChatRequest) -> ToolUse:
    tools = (
        _tool(tool.function, f"tools.{index}.function") for index, tool in enumerate(chat.tools)
    )
    toolbox = Toolbox(tools, parallel=chat.parallel_tool_calls)
    choice = chat.tool_choice
    if isinstance(choice, str):
        return toolbox.use(choice)
    if isinstance(choice, ChatToolChoice):
        return toolbox.use_one(choice.function.name, "tool_choice.function.name")
    allowed = choice.allowed_tools
    param = "tool_choice.allowed_tools.tools"
    names = [
        (tool.function.name, f"{param}.{index}.function.name")
        for index, tool in enumerate(allowed.tools)
    ]
    return toolbox.use_some(names, must_call=allowed.mode == "required")


def _tool(function: FunctionDefinition, param: str) -> Tool:
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters or NO_PARAMETERS,
        strict=bool(function.strict),
        param=param,
        schema_param=f"{param}.parameters",
    )


def _sampling(
    generation: GenerationService, chat: ChatRequest, budget: ContextBudget
) -> SamplingParams:
    if not 1 <= chat.n <= MAX_CHOICES:
        raise InvalidParameter("n", f"must be between 1 and {MAX_CHOICES}, got {chat.n}")
    sampling = chat_sampling(chat, budget)
    size = ResponseSize(
        choices=(("n", chat.n),),
        max_tokens=chat.requested_tokens,
        logprobs=("top_logprobs", sampling.logprobs),
        has_token_ids=chat.return_token_ids,
        prompts=(
            "prompt_logprobs",
            prompt_logprobs_bytes(budget.prompt_tokens, chat.prompt_logprobs),
        ),
    )
    return size.fitted(sampling, generation.max_response_bytes)

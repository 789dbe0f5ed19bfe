"""From a chat request to a job and the formatter of its response."""

from __future__ import annotations

from dataclasses import replace

from api.dialects.chat.formatter import ChatFormatter
from api.dialects.chat.protocol import ChatRequest
from api.generation.chat_prompt import ChatInput, prepare_prompt
from api.generation.chunk_formatter import ResponseContext
from api.generation.priority import job_lane, served_tier
from api.generation.prompt_logprobs import PromptLogprobs, scored_prompt
from api.generation.response_size import ResponseSize, prompt_logprobs_bytes
from api.generation.sampling import (
    ContextBudget,
    check_prompt_logprobs,
    renamed_parameters,
    sampling_params,
)
from api.generation.service import GenerationService
from api.generation.structured_output import structured_members
from api.generation.timing import Timing
from api.http.caller import Caller
from api.jobs.new_job import Prepared, new_job, now_s
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
    """Everything but the answer; also for the rows of a batch. Raises ApiError and
    InvalidParameter."""
    model = await generation.models.require(chat.model)
    _sampling(generation, chat, model.budget())  # before the prompt is read
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidParameter(
            "continue_final_message", "needs 'add_generation_prompt' to be false"
        )
    lane = job_lane(chat)
    ask = ChatInput(
        messages=chat.messages,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        guided=structured_members(chat),
        chat_template_kwargs=chat.chat_template_kwargs,
        reasoning_effort=chat.reasoning_effort,
        call_id_seed=caller.request_id,
        add_generation_prompt=chat.add_generation_prompt,
        continues=chat.continue_final_message,
        thinking_budget=chat.thinking_token_budget,
    )
    plan = await generation.pool.run(prepare_prompt, model, ask)
    budget = model.budget(len(plan.token_ids))
    budget.check_prompt("messages")
    job = new_job(
        caller,
        generation.job_defaults,
        model=model.card.name,
        kind=ChatFormatter.kind,
        token_ids=plan.token_ids,
        sampling=replace(_sampling(generation, chat, budget), grammar=plan.grammar),
        on_disconnect=chat.on_disconnect,
        queue_timeout_s=chat.queue_timeout,
        durability=chat.durability,
        num_choices=chat.n,
        lane=lane,
    )
    timing = Timing()
    facts = ResponseContext(
        id=caller.request_id,
        model=model.card.name,
        created_s=now_s(),
        num_choices=job.num_choices,
        include_usage=chat.include_usage,
        num_logprobs=job.sampling.logprobs,
        prompt_token_ids=plan.token_ids if chat.return_token_ids else None,
        service_tier=served_tier(chat),
        timing=timing if chat.return_metrics else None,
    )
    prompt, shown = scored_prompt(job), None
    if prompt is not None:
        shown = PromptLogprobs(prompt, chat.prompt_logprobs or 0, model.text.tokenizer)
    formatter = ChatFormatter(
        facts,
        model.text.tokenizer,
        plan.new_parser,
        counts_reasoning=plan.counts_reasoning,
        prompt_logprobs=shown,
    )
    return Prepared(job, formatter, timing, prompt)


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

"""From a Messages request to a job and the formatter of its response.

Ranges of sampling parameters are Anthropic's; the defaults are those of the model's makers.
"""

from __future__ import annotations

from dataclasses import replace

from api.dialects.messages.conversation import chat_input, check_thinking
from api.dialects.messages.formatter import MessageContext, MessageFormatter
from api.dialects.messages.protocol import (
    CountTokensRequest,
    MessageRequest,
    ThinkingEnabled,
)
from api.generation.chat_prompt import PreparedPrompt, prepare_prompt
from api.generation.models import ServedModel
from api.generation.response_size import ResponseSize
from api.generation.sampling import (
    ContextBudget,
    check_max_tokens,
    renamed_parameters,
    resolved_seed,
)
from api.generation.service import GenerationService
from api.http.caller import Caller
from api.jobs.new_job import Prepared, new_job
from shared.messages import InvalidParameter, SamplingParams

MAX_TEMPERATURE = 1.0
# a parameter of chat completions -> what this dialect calls it
PARAM_NAMES = {
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking",
    # Turns are not the request's messages: which of them it is would be a guess.
    "messages": "messages",
}


async def prepare_message(
    generation: GenerationService, caller: Caller, params: MessageRequest
) -> Prepared:
    """Everything but the answer. Raises ApiError and InvalidParameter."""
    model = await generation.models.require(params.model)
    _sampling(generation, params, model.budget())  # before the prompt is read
    plan = await generation.pool.run(message_prompt, model, params, caller.request_id)
    budget = model.budget(len(plan.token_ids))
    budget.check_prompt("messages")
    job = new_job(
        caller,
        generation.job_defaults,
        model=model.card.name,
        kind=MessageFormatter.kind,
        token_ids=plan.token_ids,
        sampling=replace(_sampling(generation, params, budget), grammar=plan.grammar),
        on_disconnect=params.on_disconnect,
        queue_timeout_s=params.queue_timeout,
        durability=params.durability,
    )
    facts = MessageContext(
        id=caller.request_id,
        model=model.card.name,
        prompt_tokens=len(plan.token_ids),
        is_cut_by_context=is_cut_by_context(params, budget),
    )
    tokenizer = model.text.tokenizer if plan.counts_reasoning else None
    return Prepared(job, MessageFormatter(facts, plan.new_parser, tokenizer))


def _sampling(
    generation: GenerationService, params: MessageRequest, budget: ContextBudget
) -> SamplingParams:
    size = ResponseSize(max_tokens=("max_tokens", params.max_tokens))
    return size.fitted(message_sampling(params, budget), generation.max_response_bytes)


def message_prompt(
    model: ServedModel, params: CountTokensRequest, call_id_seed: str, *, must_fit: bool = True
) -> PreparedPrompt:
    """Returns the prompt of a conversation. CPU-bound: run it in the thread pool.

    Raises InvalidParameter.
    """
    check_thinking(model, params)
    chat = chat_input(params, call_id_seed)
    with renamed_parameters(PARAM_NAMES):
        return prepare_prompt(model, chat, must_fit=must_fit)


def message_sampling(request: MessageRequest, budget: ContextBudget) -> SamplingParams:
    """Raises InvalidParameter.

    `max_tokens` may be more than the context has left: the answer then ends where the context does,
    and says so (`is_cut_by_context`).
    """
    temperature = request.temperature
    if temperature is not None and not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidParameter("temperature", f"must be between 0 and {MAX_TEMPERATURE:g}")
    check_max_tokens(request.max_tokens)
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and request.max_tokens <= thinking.budget_tokens:
        raise InvalidParameter("max_tokens", "must be greater than 'thinking.budget_tokens'")
    with renamed_parameters({"stop": "stop_sequences"}):
        return SamplingParams(
            max_tokens=min(request.max_tokens, budget.left),
            **budget.defaults.fill(
                {"temperature": temperature, "top_p": request.top_p, "top_k": request.top_k}
            ),
            seed=resolved_seed(None),
            stop=tuple(request.stop_sequences),
        )


def is_cut_by_context(request: MessageRequest, budget: ContextBudget) -> bool:
    """Whether an answer that ends by its length ends there because the context is full."""
    return request.max_tokens > budget.left

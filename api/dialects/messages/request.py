"""From a Messages request to a job and the formatter of its response.

Ranges of sampling parameters are Anthropic's; the defaults are those of the model's makers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from api.dialects.messages.blocks import AssistantMessage, SystemMessage, TextBlock
from api.dialects.messages.formatter import MessageContext, MessageFormatter
from api.dialects.messages.offered_tools import OfferedTools, offered_tools
from api.dialects.messages.protocol import (
    MAX_TEMPERATURE,
    CountTokensRequest,
    JsonFormat,
    MessageRequest,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
)
from api.dialects.messages.turns import text_content, turns
from api.generation.grammars import schema_output
from api.generation.ignored_parameters import report_ignored
from api.generation.messages import MAX_MESSAGES
from api.generation.models import GenerationService, ServedModel
from api.generation.prompt import ChatInput, PreparedPrompt, RequestedGrammar, prepare_prompt
from api.generation.sampling import (
    ContextBudget,
    ResponseSize,
    check_max_tokens,
    renamed_parameters,
    resolved_seed,
)
from api.http.caller import Caller
from api.jobs.new_job import Prepared, new_job
from shared.messages import InvalidParameter, SamplingParams

# a parameter of chat completions -> what this dialect calls it
PARAM_NAMES = {
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking",
    "tools.function.parameters": "tools.input_schema",
    # Turns are not the request's messages: which of them it is would be a guess.
    "messages": "messages",
}


async def prepare_message(
    generation: GenerationService, caller: Caller, params: MessageRequest
) -> Prepared:
    """Makes the job and formatter of a request. Raises ApiError and InvalidParameter."""
    model = await generation.models.require(params.model)
    _sampling(generation, params, model.budget())  # before the prompt is read
    prompt = await generation.pool.run(message_prompt, model, params, caller.request_id)
    budget = model.budget(len(prompt.token_ids))
    budget.check_prompt("messages")
    report_ignored(prompt.ignored, PARAM_NAMES)
    budget.report_clipped("max_tokens", params.max_tokens)
    job = new_job(
        caller,
        generation.job_defaults,
        model=model,
        kind=MessageFormatter.kind,
        token_ids=prompt.token_ids,
        sampling=replace(_sampling(generation, params, budget), grammar=prompt.grammar),
        on_disconnect=params.on_disconnect,
        params=params,
    )
    context = MessageContext(
        id=caller.request_id,
        model=model.card.name,
        prompt_tokens=len(prompt.token_ids),
        is_cut_by_context=is_cut_by_context(params, budget),
    )
    tokenizer = model.text.tokenizer if prompt.counts_reasoning else None
    return Prepared(job, MessageFormatter(context, prompt.new_parser, tokenizer))


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
    chat = chat_input(params, call_id_seed)
    with renamed_parameters(PARAM_NAMES):
        prompt = prepare_prompt(model, chat, must_fit=must_fit)
    if _thinks_anyway(model, params):
        return replace(prompt, ignored=(*prompt.ignored, "chat_template_kwargs"))
    return prompt


def message_sampling(request: MessageRequest, budget: ContextBudget) -> SamplingParams:
    """Raises InvalidParameter.

    `max_tokens` may be more than the context has left: the answer then ends at the context's end,
    and reports it (`is_cut_by_context`).
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
    """Returns whether a response that ends by its length ends there because the context is full."""
    return request.max_tokens > budget.left


# From a Messages request to a ChatInput. A last message of the assistant is continued.

BILLING_HEADER = "x-anthropic-billing-header:"
ENABLE_THINKING = "enable_thinking"  # what templates call it


def chat_input(request: CountTokensRequest, call_id_seed: str = "") -> ChatInput:
    """Returns what the prompt is made of. CPU-bound for long conversations: run it in the thread
    pool. Raises InvalidParameter."""
    tools = offered_tools(request)
    return ChatInput(
        messages=list(_messages(request, tools)),
        tool_use=tools.use,
        output=_output(request),
        chat_template_kwargs=_template_variables(request),
        reasoning_effort=_effort(request),
        call_id_seed=call_id_seed,
        continues=_is_continued(request),
        thinking_budget=_thinking_budget(request),
    )


def _thinks_anyway(model: ServedModel, request: CountTokensRequest) -> bool:
    """Returns whether thinking is to be disabled, of a model whose template cannot do that."""
    if not isinstance(request.thinking, ThinkingDisabled) or model.card.reasoning_format is None:
        return False
    template = model.text.chat_template
    return template is None or ENABLE_THINKING not in template.variables


def _messages(request: CountTokensRequest, tools: OfferedTools) -> Iterator[dict[str, Any]]:
    if not request.messages:
        raise InvalidParameter("messages", f"must have 1 to {MAX_MESSAGES} entries")
    if system := _system(request.system):
        yield {"role": "system", "content": text_content(system)}
    is_empty = True
    for turn in turns(request.messages, tools):
        is_empty = False
        yield turn
    if is_empty:
        raise InvalidParameter("messages", "no message has content that the model sees")


def _system(system: str | Sequence[TextBlock] | None) -> str | Sequence[TextBlock] | None:
    """Returns the system prompt without Claude Code's billing header.

    The header is for Anthropic and not for the model. It differs from conversation to conversation,
    at the prompt's beginning: none would share a prefix with another.
    """
    if system is None or isinstance(system, str):
        return system
    return [block for block in system if not block.text.startswith(BILLING_HEADER)]


def _output(request: CountTokensRequest) -> RequestedGrammar | None:
    found = _format(request)
    return None if found is None else schema_output(found[0].json_schema, f"{found[1]}.schema")


def _format(request: CountTokensRequest) -> tuple[JsonFormat, str] | None:
    """Returns the format of the output and its path."""
    config = request.output_config
    if config is not None and config.format is not None:
        return config.format, "output_config.format"
    return None if request.output_format is None else (request.output_format, "output_format")


def _template_variables(request: CountTokensRequest) -> dict[str, Any]:
    match request.thinking:
        case None:
            return {}
        case ThinkingAdaptive() | ThinkingEnabled():
            return {ENABLE_THINKING: True}
        case ThinkingDisabled():
            return {ENABLE_THINKING: False}


def _thinking_budget(request: CountTokensRequest) -> int | None:
    thinking = request.thinking
    return thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None


def _is_continued(request: CountTokensRequest) -> bool:
    """Returns whether the last message begins the response. Raises InvalidParameter."""
    if not request.messages or not isinstance(request.messages[-1], AssistantMessage):
        return False
    param = f"messages.{len(request.messages) - 1}.content"
    content = request.messages[-1].content
    if not isinstance(content, str):
        last = content[-1] if content else None
        if not isinstance(last, TextBlock):
            raise InvalidParameter(param, "must end with text, if the answer is to continue it")
        content = last.text
    if not content or content[-1].isspace():
        raise InvalidParameter(
            param, "must end with text, without trailing white space, to be continued"
        )
    if (found := _format(request)) is not None:
        raise InvalidParameter(
            found[1],
            "cannot be combined with a last message of the assistant, which begins the answer",
        )
    return True


def _effort(request: CountTokensRequest) -> str | None:
    """Returns the effort of the last system message that has one, else the request's."""
    effort = None if request.output_config is None else request.output_config.effort
    for message in request.messages:
        if isinstance(message, SystemMessage) and message.output_config is not None:
            effort = message.output_config.effort or effort
    return effort

"""From a Messages request to a job and the formatter of its response.

Ranges of sampling parameters are Anthropic's; the defaults are those of the model's makers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from api.dialects.messages.formatter import MessageContext, MessageFormatter
from api.dialects.messages.protocol import (
    AssistantMessage,
    CountTokensRequest,
    CustomTool,
    Message,
    MessageRequest,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from api.errors import unsupported
from api.generation.grammars import RequestedGrammar, schema_output
from api.generation.ignored_parameters import report_ignored
from api.generation.messages import MAX_CALLS, MAX_MESSAGES
from api.generation.models import GenerationService, ServedModel
from api.generation.prompt import ChatInput, PreparedPrompt, prepare_prompt
from api.generation.sampling import (
    ContextBudget,
    ResponseSize,
    check_max_tokens,
    renamed_parameters,
    resolved_seed,
)
from api.generation.tools import NO_PARAMETERS, Tool, Toolbox, ToolUse
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
        model=model.card.name,
        kind=MessageFormatter.kind,
        token_ids=prompt.token_ids,
        sampling=replace(_sampling(generation, params, budget), grammar=prompt.grammar),
        on_disconnect=params.on_disconnect,
        queue_timeout_s=params.queue_timeout,
        durability=params.durability,
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
    """Returns whether a response that ends by its length ends there because the context is full."""
    return request.max_tokens > budget.left


# From a Messages request to a ChatInput. Where the dialects differ: a `tool_result` is a message of
# its own (role `tool`), with the name of the tool that was called; the result of a call that failed
# begins with `Error: `, since templates know no `is_error`; messages of one role in a row are one
# turn; a last message of the assistant is continued.

_THOUGHTS = "reasoning_content"
ENABLE_THINKING = "enable_thinking"  # what templates call it
FAILED_PREFIX = "Error: "  # of the result of a call that failed

Content = str | list[dict[str, str]]


def chat_input(request: CountTokensRequest, call_id_seed: str = "") -> ChatInput:
    """Returns what the prompt is made of. CPU-bound for long conversations: run it in the thread
    pool. Raises InvalidParameter."""
    return ChatInput(
        messages=list(_messages(request)),
        tool_use=_tool_use(request),
        output=_output(request),
        chat_template_kwargs=_template_variables(request),
        reasoning_effort=_effort(request),
        call_id_seed=call_id_seed,
        continues=_is_continued(request),
        thinking_budget=_thinking_budget(request),
    )


def check_thinking(model: ServedModel, request: CountTokensRequest) -> None:
    """Raises InvalidParameter where thinking is to be disabled and cannot be."""
    if not isinstance(request.thinking, ThinkingDisabled) or model.card.reasoning_format is None:
        return
    template = model.text.chat_template
    if template is None or ENABLE_THINKING not in template.variables:
        raise unsupported("thinking", "this model's thinking cannot be disabled")


def _messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    if not request.messages:
        raise InvalidParameter("messages", f"must have 1 to {MAX_MESSAGES} entries")
    if request.system:
        yield {"role": "system", "content": _text(request.system)}
    names: dict[str, str] = {}  # id of a call -> name of its tool
    turn: dict[str, Any] | None = None
    for index, message in enumerate(request.messages):
        for part in _parts(message, f"messages.{index}", names):
            if turn is not None and _same_turn(turn, part):
                _join(turn, part)
                continue
            if turn is not None:
                yield _whole(turn)
            turn = part
    if turn is not None:
        yield _whole(turn)


def _parts(message: Message, path: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    if message.content == []:
        raise InvalidParameter(f"{path}.content", "must not be empty")
    if isinstance(message, AssistantMessage):
        yield _assistant(message, path, names)
    elif isinstance(message, UserMessage):
        yield from _user(message, path, names)
    else:
        yield {"role": "system", "content": _text(message.content)}


def _user(message: UserMessage, path: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    for index, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            yield _tool_result(block, f"{path}.content.{index}", names)
        else:
            yield {"role": "user", "content": [_text_part(block)]}


def _tool_result(block: ToolResultBlock, path: str, names: dict[str, str]) -> dict[str, Any]:
    name = names.get(block.tool_use_id)
    if name is None:
        raise InvalidParameter(
            f"{path}.tool_use_id", "must be the id of a tool_use in an earlier message"
        )
    content = _text(block.content or "")
    if block.is_error:
        if isinstance(content, str):
            content = FAILED_PREFIX + content
        else:
            content = [{"type": "text", "text": FAILED_PREFIX + content[0]["text"]}, *content[1:]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}


def _assistant(message: AssistantMessage, path: str, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    turn: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(_text_part(block))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        else:
            if block.id in names:
                raise InvalidParameter(f"{path}.content.{index}.id", "must be unique")
            names[block.id] = block.name
            calls.append(_call(block))
    if texts:
        turn["content"] = texts
    if thoughts:
        turn[_THOUGHTS] = thoughts  # a list until the turn is whole
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _same_turn(turn: dict[str, Any], part: dict[str, Any]) -> bool:
    role: str = turn["role"]
    return role != "tool" and role == part["role"]


def _join(turn: dict[str, Any], part: dict[str, Any]) -> None:
    """Extends `turn` in place: the work for a turn is linear in its blocks."""
    if "content" in turn:
        turn["content"] = _as_parts(turn["content"])
    if "content" in part:
        turn.setdefault("content", []).extend(_as_parts(part["content"]))
    if _THOUGHTS in part:
        turn.setdefault(_THOUGHTS, []).extend(part[_THOUGHTS])
    if "tool_calls" in part:
        turn.setdefault("tool_calls", []).extend(part["tool_calls"])


def _whole(turn: dict[str, Any]) -> dict[str, Any]:
    if len(turn.get("tool_calls", ())) > MAX_CALLS:
        raise InvalidParameter("messages", f"at most {MAX_CALLS} tool_use blocks in one turn")
    if _THOUGHTS in turn:
        turn[_THOUGHTS] = "\n".join(turn[_THOUGHTS])
    return {"role": turn["role"], "content": "", **turn}


def _as_parts(content: Content) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: str | Sequence[TextBlock]) -> Content:
    if isinstance(content, str):
        return content
    return [_text_part(block) for block in content]


def _text_part(block: TextBlock) -> dict[str, str]:
    return {"type": "text", "text": block.text}


def _tool_use(request: CountTokensRequest) -> ToolUse:
    choice = request.tool_choice
    is_single = not isinstance(choice, ToolChoiceNone | None) and choice.disable_parallel_tool_use
    tools = (_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools))
    toolbox = Toolbox(tools, parallel=not is_single)
    match choice:
        case None | ToolChoiceAuto():
            return toolbox.use("auto")
        case ToolChoiceAny():
            return toolbox.use("required")
        case ToolChoiceTool(name=name):
            return toolbox.use_one(name, "tool_choice.name")
        case ToolChoiceNone():
            return toolbox.use("none")


def _tool(tool: CustomTool, param: str) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema or NO_PARAMETERS,
        strict=bool(tool.strict),
        param=param,
        schema_param=f"{param}.input_schema",
    )


def _output(request: CountTokensRequest) -> RequestedGrammar | None:
    config = request.output_config
    if config is None or config.format is None:
        return None
    return schema_output(config.format.json_schema, "output_config.format.schema")


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
            param, "must have text at its end and no white space behind it, to be continued"
        )
    if request.output_config is not None and request.output_config.format is not None:
        raise InvalidParameter(
            "output_config.format", "is for whole answers: the last message begins this one already"
        )
    return True


def _effort(request: CountTokensRequest) -> str | None:
    """Returns chat's name of an effort, whose highest is `xhigh`."""
    effort = None if request.output_config is None else request.output_config.effort
    return "xhigh" if effort == "max" else effort

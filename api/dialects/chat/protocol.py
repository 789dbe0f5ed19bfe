"""The request of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from api.generation.protocol import (
    CompletionFields,
    Objects,
    PromptLogprobs,
    ResponseModel,
    UsageObject,
)

# Tokens of reasoning.
ThinkingBudget = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ChatRequest(CompletionFields):
    """POST /v1/chat/completions. Messages and tools are checked where the prompt is prepared."""

    kind: ClassVar[str] = "chat"

    messages: Objects
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Objects = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    thinking_token_budget: ThinkingBudget | None = None

    @property
    def requested_tokens(self) -> tuple[str, int | None]:
        """The parameter that bounds the response's tokens, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


# The response.


class FunctionCall(ResponseModel):
    name: str
    arguments: str


class ChatToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "function_call"]
    stop_reason: str | int | None = None


class ChatCompletion(ResponseModel):
    """A whole answer; streamed it is `chat.completion.chunk`s and `[DONE]`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobs | None = None

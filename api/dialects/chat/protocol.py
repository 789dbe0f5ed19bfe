"""The request of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from api.generation.protocol import CompletionFields, Objects

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

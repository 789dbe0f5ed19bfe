"""The request of POST /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from api.generation.messages import UNSERVED_MESSAGES, ChatMessages, left_out_parts
from api.generation.protocol import CompletionFields, RequestModel
from api.generation.schemas import MaxTokens, TopLogprobs
from api.generation.tools import MAX_TOOLS, ToolName

# Tokens of reasoning.
ThinkingBudget = Annotated[int, Field(ge=1, le=2**31 - 1)]


class FunctionDefinition(RequestModel):
    """A function. `parameters` is a JSON schema of an object."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: dict[str, Any] | None = None  # without effect, as in messages


class FunctionName(RequestModel):
    """The name of one of `tools`."""

    name: str


class ChatToolChoice(RequestModel):
    """One call of this tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    """Some of `tools`; `required`: at least one call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChatToolChoice], Field(fail_fast=True, min_length=1)]


class ChatAllowedTools(RequestModel):
    """Calls of some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(CompletionFields):
    """POST /v1/chat/completions."""

    kind: ClassVar[str] = "chat"
    unserved: ClassVar = (
        *UNSERVED_MESSAGES,
        (re.compile(r"tools\.\d+\.type"), "only tools of type 'function' are served"),
        (
            re.compile(r"tool_choice\.type"),
            "only the types 'function' and 'allowed_tools' are served",
        ),
    )

    messages: ChatMessages
    logprobs: bool = False
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = []
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ChatToolChoice | ChatAllowedTools, Field(discriminator="type")]
    ) = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template: str = ""  # a name
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    thinking_token_budget: ThinkingBudget | None = None

    def left_out(self) -> Iterator[str]:
        """Yields the names of the parts that the model does not see."""
        return left_out_parts(self.messages)

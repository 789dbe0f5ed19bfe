"""The requests of the Messages dialect, member by member, as Anthropic's SDKs type them.

What is not here is refused by name. Members that ask for what happens anyway are here with the one
value that does: `cache_control` (the prefix cache finds every repeated prefix by itself),
`service_tier`, `speed`. Others that change nothing are in `api.generation.ignored_parameters`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.generation.messages import MAX_MESSAGES, PartCount
from api.generation.protocol import (
    JobParameters,
    OnlyFalse,
    RequestModel,
    ResponseModel,
    StreamParameters,
    Texts,
)
from api.generation.tools import MAX_TOOLS, ToolName
from api.http.pagination import Absent
from shared.messages import InvalidParameter

MAX_USER_ID_CHARS = 512


class CacheControl(RequestModel):
    """Accepted everywhere, without effect: nothing needs to be marked to be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Literal["global"] | None = None  # agents send it; a tenant's prefixes stay its own


class DirectCaller(RequestModel):
    """Who called a tool: the model itself."""

    type: Literal["direct"]


class TextBlock(RequestModel):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"] = "text"  # the only kind where there is no choice
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


# Lists end at their first fault: the cost of an error is bounded.
TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]


class ThinkingBlock(RequestModel):
    """What the model thought before; goes to the template, which decides whether it is shown."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(RequestModel):
    """A call that the model made before."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class ToolResultBlock(RequestModel):
    """The result of a tool call; `is_error`: the call failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
UserBlocks = Annotated[list[UserBlock], Field(fail_fast=True)]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]
AssistantBlocks = Annotated[list[AssistantBlock], Field(fail_fast=True)]


class UserMessage(RequestModel):
    """Text is short for one text block."""

    role: Literal["user"]
    content: str | UserBlocks


class AssistantMessage(RequestModel):
    """An earlier answer, as it was given."""

    role: Literal["assistant"]
    content: str | AssistantBlocks


class SystemMessage(RequestModel):
    """Instructions in the course of a conversation."""

    role: Literal["system"]
    content: str | TextBlocks


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class CustomTool(RequestModel):
    """A tool of the caller's. Tools that run at a server are not served."""

    type: Literal["custom"] | None = None  # first: its error is the one to read
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: OnlyFalse | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = None
    eager_input_streaming: bool | None = None
    input_examples: None = None


class ToolChoiceAuto(RequestModel):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class ToolChoiceAny(RequestModel):
    """At least one call."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class ToolChoiceTool(RequestModel):
    """A call of this one."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class ToolChoiceNone(RequestModel):
    """No call."""

    type: Literal["none"]


ToolChoice = Annotated[
    ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone,
    Field(discriminator="type"),
]


class ThinkingAdaptive(RequestModel):
    """The model thinks as long as it likes: the template's `enable_thinking`."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = None


class ThinkingEnabled(RequestModel):
    """As adaptive, with at most so many tokens of it, where the model can be kept to that."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    display: Literal["summarized"] | None = None


class ThinkingDisabled(RequestModel):
    """Disables thinking in the template."""

    type: Literal["disabled"]


Thinking = Annotated[
    ThinkingAdaptive | ThinkingEnabled | ThinkingDisabled, Field(discriminator="type")
]


class JsonFormat(RequestModel):
    """The answer's text is JSON of this schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """How the answer has to look."""

    format: JsonFormat | None = None
    effort: str | None = None


class Metadata(RequestModel):
    """A label without effect."""

    user_id: Annotated[str, Field(max_length=MAX_USER_ID_CHARS)] | None = None


# Why a parameter is refused, where "invalid value" would not explain enough.

# What Anthropic's SDKs know: they send the whole conversation again, without the member.
_THREAD, _NO_THREADS = "thread", "thread_unsupported_request"

# the path of a parameter -> why this value of it is not served
_UNSERVED = (
    (
        re.compile(r"(messages\.\d+\.content|system)\.\d+(\.content\.\d+)?\.type"),
        "blocks are text, in an assistant's message also thinking and tool_use, in a user's also "
        "tool_result",
    ),
    (re.compile(r"tools\.\d+\.type"), "only custom tools are served: none runs at this server"),
    (
        re.compile(r"thinking\.type"),
        "'adaptive' lets the model think as long as it likes, 'enabled' as long as its budget "
        "lasts, 'disabled' turns it off in the chat template",
    ),
    (re.compile(r"thinking\.display"), "what the model thinks is always shown"),
    (re.compile(r"speed"), "there is one speed"),
    (re.compile(r"service_tier"), "there is one tier"),
    (re.compile(r"tools\.\d+\.defer_loading"), "every tool is shown to the model"),
    (re.compile(r"tools\.\d+\.allowed_callers\.\d+"), "only the model itself calls tools"),
    (re.compile(r"tools\.\d+\.input_examples"), "examples are not shown to the model"),
)


class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    kind: ClassVar[str] = "message"
    unserved: ClassVar = _UNSERVED

    model: str
    messages: Messages
    system: str | TextBlocks | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_part_counts(cls, body: object) -> object:
        """Raises InvalidParameter for more blocks than one request may have, before they are
        parsed."""
        if isinstance(body, dict):
            PartCount("system").add(body, "system")
            _check_block_count(body.get("messages"))
        return body

    @classmethod
    def explain(cls, error: InvalidParameter) -> InvalidParameter:
        """Returns an error of parsing with the reason, where one is known."""
        if error.param == _THREAD:
            message = "No threads are kept here: send the whole conversation, without this member."
            return InvalidParameter(_THREAD, message, _NO_THREADS)
        return super().explain(error)


def _check_block_count(messages: object) -> None:
    """Raises InvalidParameter for too many blocks in a conversation that is not parsed yet."""
    if not isinstance(messages, list):
        return
    count = PartCount("messages")
    for message in messages[:MAX_MESSAGES]:
        count.add(message, "content")
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            for block in message["content"]:
                count.add(block, "content")


class MessageRequest(CountTokensRequest, StreamParameters, JobParameters):
    """POST /v1/messages. Its bases have the extensions, as in the other dialects."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Texts = []
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


# The responses.


class MessagesErrorDetails(ResponseModel):
    """The code that the other dialects have, and the member that is at fault."""

    error_code: str | Absent = None
    param: str | Absent = None


class MessagesErrorObject(ResponseModel):
    """What is wrong, and of which of Anthropic's kinds it is."""

    type: str
    message: str
    details: MessagesErrorDetails | Absent = None


class MessagesError(ResponseModel):
    """The body of every error of the Messages dialect, and of an error event."""

    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str


class MessagesUsage(ResponseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class MessagesAnswer(ResponseModel):
    """A whole answer; streamed it is Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessagesUsage


class InputTokens(ResponseModel):
    input_tokens: int

"""The requests of the Messages dialect, member by member, as Anthropic's SDKs type them.

Other members are refused by name. `cache_control` and `service_tier` are here with the values
that request the default (the prefix cache finds every repeated prefix by itself). Others
that change nothing are in `api.generation.ignored_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.dialects.messages.blocks import (
    InlineTool,
    Messages,
    TextBlocks,
    ToolAdditionBlock,
    check_block_count,
    left_out_blocks,
    tool_changes,
)
from api.dialects.messages.tools import CacheControl, ToolChoice, ToolDefinition, left_out_tools
from api.generation.messages import PartCount
from api.generation.protocol import JobParameters, RequestModel, StreamParameters
from api.generation.response_schemas import EventModel, ResponseModel
from api.generation.schemas import MaxTokens, Share, StopStrings, described
from api.generation.tools import MAX_TOOLS
from api.http.openapi import Absent
from shared.messages import InvalidParameter


class _Shown(RequestModel):
    """Members that change nothing: they are taken out before."""

    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: dict[str, Any] | None = None


class ThinkingAdaptive(_Shown):
    """The model thinks as long as it likes: the template's `enable_thinking`."""

    type: Literal["adaptive"]


class ThinkingEnabled(_Shown):
    """As adaptive, with at most `budget_tokens` of it, if the model can be kept to that."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]


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
    task_budget: dict[str, Any] | None = None  # changes nothing: it is taken out before


MAX_TEMPERATURE = 1.0

# Why a parameter is refused, where "invalid value" would not explain enough.

# What Anthropic's SDKs know: they send the whole conversation again, without the member.
_THREAD, _NO_THREADS = "thread", "thread_unsupported_request"

# the path of a parameter -> why this value of it is not served
_UNSERVED = (
    (
        re.compile(r"messages\.\d+\.content\.\d+\.type"),
        "messages of this role have no blocks of this type",
    ),
    (
        re.compile(r"messages\.\d+\.content\.\d+\.content\.\d+\.type"),
        "tool results may have text, images, documents, search results and tool references",
    ),
    (re.compile(r"system\.\d+\.type"), "the system prompt must be text"),
    (
        re.compile(r"tools\.\d+\.type"),
        "it is neither 'custom' nor a type of Anthropic's with its date, such as 'bash_20250124'",
    ),
    (
        re.compile(r"thinking\.type"),
        "'adaptive' lets the model think as long as it likes, 'enabled' as long as its budget "
        "lasts, 'disabled' turns it off in the chat template",
    ),
    (re.compile(r"service_tier"), "there is one tier"),
)


class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    kind: ClassVar[str] = "message"
    unserved: ClassVar = _UNSERVED

    model: str
    messages: Messages
    system: str | TextBlocks | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # an earlier name of `output_config.format`
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_part_counts(cls, body: object) -> object:
        """Raises InvalidParameter for more blocks than one request may have, before they are
        parsed."""
        if isinstance(body, dict):
            PartCount("system").add(body, "system")
            check_block_count(body.get("messages"))
        return body

    @classmethod
    def explain(cls, error: InvalidParameter) -> InvalidParameter:
        """Returns an error of parsing with the reason, where one is known."""
        if error.param == _THREAD:
            message = (
                "Threads are not supported: send the whole conversation, without this parameter."
            )
            return InvalidParameter(_THREAD, message, _NO_THREADS)
        return super().explain(error)

    def left_out(self) -> Iterator[str]:
        """Yields the names of tools, blocks and members that the model does not see."""
        yield from left_out_tools(self.tools)
        yield from left_out_blocks(self.messages)
        for change, _ in tool_changes(self.messages):
            if isinstance(change, ToolAdditionBlock) and isinstance(change.tool, InlineTool):
                yield from change.tool.definition.left_out()


class MessageRequest(CountTokensRequest, StreamParameters, JobParameters):
    """POST /v1/messages. Its bases have the extensions, as in the other dialects."""

    max_tokens: MaxTokens
    temperature: Annotated[float, described(minimum=0, maximum=MAX_TEMPERATURE)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, described(minimum=0, maximum=2**31 - 1)] | None = None
    stop_sequences: StopStrings = []
    service_tier: Literal["auto", "standard_only"] | None = None


# The responses.


class MessagesErrorDetails(ResponseModel):
    """The code that the other dialects have, and the member that is at fault."""

    error_code: str | Absent = None
    param: str | Absent = None


class MessagesErrorObject(ResponseModel):
    """The error's message and its type, one of Anthropic's."""

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


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesAnswer(ResponseModel):
    """A whole answer; streamed it is Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage


class InputTokens(ResponseModel):
    input_tokens: int


# The events of a stream.


class StartUsage(EventModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: Literal[0]
    service_tier: Literal["standard"]


class StartedMessage(EventModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[Any], Field(max_length=0)]
    stop_reason: None
    stop_sequence: None
    usage: StartUsage


class MessageStart(EventModel):
    type: Literal["message_start"]
    message: StartedMessage


class StartedText(EventModel):
    type: Literal["text"]
    text: Literal[""]


class StartedThinking(EventModel):
    type: Literal["thinking"]
    thinking: Literal[""]
    signature: Literal[""]


class StartedToolUse(EventModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], Field(max_length=0)]


class BlockStart(EventModel):
    type: Literal["content_block_start"]
    index: int
    content_block: Annotated[
        StartedText | StartedThinking | StartedToolUse, Field(discriminator="type")
    ]


class TextDelta(EventModel):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(EventModel):
    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(EventModel):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(EventModel):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputDelta, Field(discriminator="type")]


class BlockStop(EventModel):
    type: Literal["content_block_stop"]
    index: int


class ThinkingTokens(EventModel):
    thinking_tokens: int


class EndUsage(EventModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | Absent = None


class MessageStop(EventModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(EventModel):
    type: Literal["message_delta"]
    delta: MessageStop
    usage: EndUsage


class BareEvent(EventModel):
    type: Literal["ping", "message_stop"]


MessagesEvent = Annotated[
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | BareEvent | MessagesError,
    Field(discriminator="type"),
]

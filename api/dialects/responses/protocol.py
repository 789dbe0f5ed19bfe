"""The request of POST /v1/responses, member by member, and the members known to be refused.

As in the other OpenAI dialects a member whose value is null counts as absent, and a member that
changes nothing is taken out before (`api.generation.ignored_parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.dialects.responses.items import COMPACTION_TRIGGER, Order, ResponseInput, left_out_items
from api.dialects.responses.tools import ResponseTools, ToolChoice, left_out_of
from api.errors import MAX_ECHO_CHARS
from api.generation.ignored_parameters import rows_of
from api.generation.protocol import (
    JobParameters,
    JsonSchema,
    Labels,
    RequestModel,
    ResponseFormatJsonObject,
    ResponseFormatText,
    SamplingFields,
    Texts,
    TierFields,
)
from api.generation.response_schemas import ReasoningTokens, ResponseModel
from api.generation.schemas import (
    LABELS,
    MAX_LABEL_CHARS,
    MAX_LABEL_KEY_CHARS,
    MAX_LABELS,
    MaxTokens,
    TopLogprobs,
    described,
)
from api.http.openapi import Absent
from api.http.pagination import DIGITS, Flag, ListPage, PageQuery, QueryModel
from api.request_errors import missing_parameter, unsupported
from shared.messages import InvalidParameter

LOGPROBS = "message.output_text.logprobs"
MAX_SEQUENCE_NUMBER = 2**53
_INCLUDED: dict[str, Any] = {"items": {"type": "string", "enum": [LOGPROBS]}}

# values of `include` that are accepted without effect
_IGNORED = [
    name for row in rows_of("response").get("include", ()) for name in row.values.schema["enum"]
]


class TextFormatJsonSchema(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


TextFormat = Annotated[
    ResponseFormatText | ResponseFormatJsonObject | TextFormatJsonSchema,
    Field(discriminator="type"),
]


class ResponseText(RequestModel):
    """`text`: what the output must be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(RequestModel):
    """`reasoning`: the effort, and whether a summary is wanted."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(RequestModel):
    """No padding is ever sent: `include_obfuscation` changes nothing."""

    include_obfuscation: bool | None = None


_UNSERVED = (
    (re.compile(r"input\.\d+\.type"), "items of this type are not served"),
    (re.compile(r"input\.\d+\.(content|output)\.\d+\.type"), "only text is served"),
    (re.compile(r"tools\.\d+\.(tools\.\d+\.)?type"), "tools of this type are not known here"),
    (
        re.compile(r"tools\.\d+\.(tools\.\d+\.)?allowed_callers"),
        "only the model itself calls tools",
    ),
    (re.compile(r"tools\.\d+\.(tools\.\d+\.)?async"), "no tool runs at this server"),
    (re.compile(r"tool_choice\.type"), "choices of this type are not known here"),
)


class ResponseRequest(SamplingFields, TierFields, JobParameters):
    """POST /v1/responses. Its bases have the extensions, as in chat completions."""

    kind: ClassVar[str] = "response"
    unserved: ClassVar = _UNSERVED

    model: str
    input: ResponseInput
    instructions: str | None = None
    tools: ResponseTools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: ResponseText = Field(default_factory=ResponseText)
    reasoning: ResponseReasoning = Field(default_factory=ResponseReasoning)
    max_output_tokens: MaxTokens | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[Texts, described(items={"enum": [LOGPROBS, *_IGNORED]})] = []
    metadata: Annotated[Labels, described(**LABELS)] = {}
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    background: bool = False
    previous_response_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template: str = ""  # a name
    chat_template_kwargs: dict[str, Any] = {}

    def left_out(self) -> Iterator[str]:
        """Yields the names of hosted tools and items, of media, and of foreign encoded text."""
        yield from left_out_of(self.tools, "tools")
        yield from left_out_items(self.input)

    @property
    def is_compaction(self) -> bool:
        """Returns whether the response is a summary of the conversation."""
        items = () if isinstance(self.input, str) else self.input
        return any(item["type"] == COMPACTION_TRIGGER for item in items)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include


class ConversationRequest(ResponseRequest):
    """A conversation: its items, or an earlier response."""

    input: ResponseInput = []

    @model_validator(mode="after")
    def _check_input(self) -> ConversationRequest:
        if not self.input and self.previous_response_id is None:
            raise missing_parameter("input")
        return self


class InputTokensRequest(ConversationRequest):
    """POST /v1/responses/input_tokens: a request whose prompt is counted."""


class CompactRequest(ConversationRequest):
    """POST /v1/responses/compact: a conversation of which a summary is made."""

    @property
    def is_compaction(self) -> bool:
        return True


def check_request(request: ResponseRequest) -> None:
    """Checks what does not depend on the model. Raises InvalidParameter."""
    _check_stream(request)
    _check_include(request)
    _check_metadata(request.metadata)
    if request.text.verbosity is not None:
        raise InvalidParameter("text.verbosity", "must be 'low', 'medium' or 'high'")
    if request.background and not request.store:
        raise InvalidParameter(
            "background", "needs 'store' to be true: its answer is fetched later"
        )


def _check_stream(request: ResponseRequest) -> None:
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidParameter("stream_options", "only allowed when 'stream' is true")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "no padding is sent")


def _check_include(request: ResponseRequest) -> None:
    check_includes(request.include)
    if request.top_logprobs and not request.wants_logprobs:
        raise InvalidParameter("top_logprobs", f"needs '{LOGPROBS}' in 'include'")


def check_includes(include: list[str]) -> None:
    """Checks `include`: only log probabilities are optional. Raises InvalidParameter."""
    for index, name in enumerate(include):
        if name != LOGPROBS:
            raise unsupported(f"include.{index}", f"'{name[:MAX_ECHO_CHARS]}' is not served")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_LABELS:
        raise InvalidParameter("metadata", f"at most {MAX_LABELS} pairs")
    for key, value in metadata.items():
        if len(key) > MAX_LABEL_KEY_CHARS or len(value) > MAX_LABEL_CHARS:
            raise InvalidParameter(
                "metadata",
                f"keys have at most {MAX_LABEL_KEY_CHARS} characters, values at most "
                f"{MAX_LABEL_CHARS}",
            )


# The responses.


class InputTokensDetails(ResponseModel):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(ResponseModel):
    """A response; streamed it is OpenAI's events, each with its `sequence_number`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None
    frequency_penalty: float
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedResponse(ResponseModel):
    """A conversation as one item, which a later request begins with."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class ResponseDeleted(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(ListPage[dict[str, Any]]):
    """A page of input items; newest first by default."""


# The queries.


class IncludeQuery(QueryModel):
    """A query with what a response includes: only log probabilities are ever left out."""

    include: list[str] = Field([], json_schema_extra=_INCLUDED)
    sdk_include: list[str] = Field([], alias="include[]", json_schema_extra=_INCLUDED)

    def check(self) -> None:
        """Raises InvalidParameter for values that cannot be included."""
        check_includes([*self.include, *self.sdk_include])


class ResponseQuery(IncludeQuery):
    """The query of GET /v1/responses/{id}."""

    stream: Flag = False
    starting_after: Annotated[int, Field(ge=0, lt=MAX_SEQUENCE_NUMBER), DIGITS] | Absent = None
    include_obfuscation: Flag = Field(False, json_schema_extra={"enum": [False]})


class ItemsQuery(PageQuery, IncludeQuery):
    """The query of GET /v1/responses/{id}/input_items."""

    limit: int = Field(20, ge=1, le=100)
    order: Order = "desc"

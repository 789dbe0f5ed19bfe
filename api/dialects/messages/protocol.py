"""The requests of the Messages dialect, member by member, as Anthropic's SDKs type them.

What is not here is refused by name. Members that ask for what happens anyway are here with the one
value that does: `cache_control` (the prefix cache finds every repeated prefix by itself),
`service_tier`, `speed`. Others that change nothing are in `api.generation.unused_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from api.generation.models import ServedModel
from api.generation.protocol import QueueTimeout, StreamInterval
from shared.messages import Durability, InvalidParameter, OnDisconnect

MAX_USER_ID_CHARS = 512


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Accepted everywhere, without effect: nothing needs to be marked to be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Literal["global"] | None = None  # agents send it; a tenant's prefixes stay its own


class DirectCaller(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Who called a tool: the model itself."""

    type: Literal["direct"]


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Text of a message, of the system prompt or of a tool's result."""

    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="thinking"):
    """What the model thought before; goes to the template, which decides whether it is shown."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool_use"):
    """A call that the model made before."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool_result"):
    """What a call gave; the result of one that failed (`is_error`) is told as such."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class UserMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"
):
    """Text is short for one text block."""

    content: str | list[TextBlock | ToolResultBlock]


class AssistantMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"
):
    """An earlier answer, as it was given."""

    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class SystemMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="system"
):
    """Instructions in the course of a conversation."""

    content: str | list[TextBlock]


Message = UserMessage | AssistantMessage | SystemMessage


class CustomTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the caller's. Tools that run at a server are not served."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = None
    input_examples: None = None


class ToolChoiceAuto(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool = False


class ToolChoiceAny(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="any"):
    """At least one call."""

    disable_parallel_tool_use: bool = False


class ToolChoiceTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="tool"):
    """A call of this one."""

    name: str
    disable_parallel_tool_use: bool = False


class ToolChoiceNone(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="none"):
    """No call."""


ToolChoice = ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone


class ThinkingAdaptive(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="adaptive"):
    """The model thinks as long as it likes: the template's `enable_thinking`."""

    display: Literal["summarized"] | None = None


class ThinkingEnabled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="enabled"):
    """As adaptive, with at most so many tokens of it, where the model can be kept to that."""

    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    display: Literal["summarized"] | None = None


class ThinkingDisabled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="disabled"):
    """The template is told that there is no thinking."""


Thinking = ThinkingAdaptive | ThinkingEnabled | ThinkingDisabled


class JsonFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer's text is JSON of this schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the answer has to look."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A label without effect."""

    user_id: Annotated[str, msgspec.Meta(max_length=MAX_USER_ID_CHARS)] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    model: str
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None


class MessageRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. From `stream_interval` on extensions, as in the others."""

    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = []
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stream_interval: StreamInterval | None = None
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    queue_timeout: QueueTimeout | None = None
    durability: Durability | None = None


# GET /v1/models in Anthropic's shape: a page of models, by cursor.

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def model_page(models: Sequence[ServedModel], query: Mapping[str, str]) -> dict[str, Any]:
    """`limit`, `after_id` and `before_id` as Anthropic has them. Raises InvalidParameter."""
    names = [model.card.name for model in models]
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    begin, end = 0, len(models)
    if "after_id" in query:
        begin = _position(names, query["after_id"], "after_id") + 1
    if "before_id" in query:
        end = _position(names, query["before_id"], "before_id")
        begin = max(begin, end - limit)
        has_more = begin > 0
    else:
        has_more = end > begin + limit
        end = min(end, begin + limit)
    page = [model_info(model) for model in models[begin:end]]
    return {
        "data": page,
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def model_info(model: ServedModel) -> dict[str, Any]:
    """One model; `max_input_tokens` and `max_tokens` are each all that prompt and answer share."""
    card = model.card
    created = datetime.fromtimestamp(card.created_s, UTC)
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.context_tokens,
        "max_tokens": model.context_tokens,
    }


def _limit(text: str) -> int:
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidParameter("limit", f"must be between 1 and {MAX_LIMIT}")
    return limit


def _position(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise InvalidParameter(param, "must be the id of a model")
    return names.index(name)

"""Objects of responses and stream events that several dialects share, for OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from api.http.openapi import Absent


class ResponseModel(BaseModel):
    """An object of a response, as the OpenAPI document describes it.

    Optional fields are left out of a response that did not request them. A response may have more
    fields than its model: clients ignore what they do not know.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Returns the schema of sent values: a field with a default is always present."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        sent = [
            name
            for name, field in cls.model_fields.items()
            if field.is_required() or field.default is not None
        ]
        for name in set(schema["properties"]) - set(sent):
            schema["properties"][name].pop("default", None)
        schema["required"] = sent
        return reference


class CachedTokens(ResponseModel):
    cached_tokens: int


class ReasoningTokens(ResponseModel):
    reasoning_tokens: int


class UsageObject(ResponseModel):
    """Counts of tokens; the prompt counts once, however many choices there are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class PromptToken(ResponseModel):
    """A token that may stand at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


# By token id; null for the first token.
PromptLogprobs = list[dict[str, PromptToken] | None]


class EventModel(ResponseModel):
    """An object of a stream's event, which has no other members."""

    model_config = ConfigDict(extra="forbid")


class RunningUsage(EventModel):
    """The counts so far, of a chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChunkMetrics(EventModel):
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class ChunkChoice(EventModel):
    """The members of every choice of a chunk."""

    index: int
    logprobs: dict[str, Any] | None
    stop_reason: str | int | Absent = None
    token_ids: list[int] | Absent = None


class Chunk(EventModel):
    """The members of every chunk."""

    id: str
    created: int
    model: str
    usage: UsageObject | RunningUsage | None = None
    service_tier: str | Absent = None
    prompt_token_ids: list[int] | Absent = None
    metrics: ChunkMetrics | None = None  # null for several choices

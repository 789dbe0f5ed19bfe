"""The events of streams, as the OpenAPI document describes them: what several dialects have."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from api.generation.protocol import ResponseModel, UsageObject
from api.http.pagination import Absent


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
    """What the choices of all chunks have."""

    index: int
    logprobs: dict[str, Any] | None
    stop_reason: str | int | Absent = None
    token_ids: list[int] | Absent = None


class Chunk(EventModel):
    """What all chunks have."""

    id: str
    created: int
    model: str
    usage: UsageObject | RunningUsage | None = None
    service_tier: str | Absent = None
    prompt_token_ids: list[int] | Absent = None
    metrics: ChunkMetrics | None = None  # null for several choices

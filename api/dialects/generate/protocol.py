"""The request of POST /generate."""

from __future__ import annotations

from typing import Literal

from api.generation.prompt_member import Prompt
from api.generation.protocol import JobParameters, StopTokenIds, StreamParameters
from api.generation.response_schemas import PromptLogprobs, ResponseModel, UsageObject
from api.generation.schemas import (
    Count,
    MaxTokens,
    RepetitionPenalty,
    Seed,
    Share,
    StopString,
    StopStrings,
    Temperature,
    TopK,
    TopLogprobs,
)
from api.http.openapi import Absent


class GenerateRequest(StreamParameters, JobParameters):
    """POST /generate: the native dialect, which streams by default."""

    prompt: Prompt
    model: str | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    rep_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings = []
    stop_token_ids: StopTokenIds = []
    min_tokens: Count = 0
    ignore_eos: bool = False
    prompt_logprobs: TopLogprobs | None = None
    stream: bool = True


# The response.


class Generated(ResponseModel):
    """A whole answer; streamed it is events with `text` and `token_ids`, the last with `done`."""

    id: str
    model: str
    text: str
    token_ids: list[int]
    done: Literal[True]
    full_text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    usage: UsageObject
    ttft_ms: float | None
    prompt_logprobs: PromptLogprobs | Absent = None

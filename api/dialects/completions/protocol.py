"""The request of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from api.generation.prompt_member import Prompt
from api.generation.protocol import CompletionFields
from api.generation.response_schemas import (
    Chunk,
    ChunkChoice,
    PromptLogprobs,
    ResponseModel,
    UsageObject,
)
from api.generation.schemas import described
from api.http.openapi import Absent, Error
from shared.messages import MAX_CHOICES

MAX_LOGPROBS = 5


class CompletionRequest(CompletionFields):
    """POST /v1/completions."""

    kind: ClassVar[str] = "completion"

    prompt: Prompt
    best_of: Annotated[int, described(minimum=1, maximum=MAX_CHOICES)] | None = None
    echo: bool = False
    logprobs: Annotated[int, described(minimum=0, maximum=MAX_LOGPROBS)] | None = None


# The response.


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "content_filter"]
    stop_reason: str | int | Absent = None
    prompt_logprobs: PromptLogprobs | Absent = None


class Completion(ResponseModel):
    """A whole answer; streamed it is chunks of the same shape and `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    job_ids: list[str] | Absent = None  # of several prompts, in their order


# The events of a stream.


class CompletionChunkChoice(ChunkChoice):
    text: str
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] | Absent = None


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    job_ids: list[str] | Absent = None


CompletionEvent = CompletionChunk | Error

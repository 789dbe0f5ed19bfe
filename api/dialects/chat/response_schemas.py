"""The responses and stream events of POST /v1/chat/completions, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from api.generation.response_schemas import (
    Chunk,
    ChunkChoice,
    EventModel,
    PromptLogprobs,
    ResponseModel,
    UsageObject,
)
from api.http.openapi import Absent, Error


class FunctionCall(ResponseModel):
    name: str
    arguments: str


class ChatToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | Absent = None
    tool_calls: list[ChatToolCall] | Absent = None


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "function_call"]
    stop_reason: str | int | Absent = None


class ChatCompletion(ResponseModel):
    """A whole answer; streamed it is `chat.completion.chunk`s and `[DONE]`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobs | Absent = None


# The events of a stream.


class FunctionDelta(EventModel):
    name: str | Absent = None
    arguments: str


class CallDelta(EventModel):
    index: int
    id: str | Absent = None
    type: Literal["function"] | Absent = None
    function: FunctionDelta


class ChatDelta(EventModel):
    role: Literal["assistant"] | Absent = None
    content: str | Absent = None
    reasoning_content: str | Absent = None
    tool_calls: list[CallDelta] | Absent = None


class ChatChunkChoice(ChunkChoice):
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


ChatEvent = ChatChunk | Error

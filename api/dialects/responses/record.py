"""StoredRequest: what must be known, beside a job's log, to make its response again.

It is stored with the job, as JSON. A response object is made of it and of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.dialects.responses.calls import CallTarget, Item
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.tools import is_hosted, tool_payload
from api.generation.protocol import RequestModel, ResponseFormatText, served_tier
from api.output_parsers.parser import ParserConfig
from shared.messages import MAX_REQUEST_RECORD_BYTES, InvalidParameter, SamplingParams
from shared.text.model_card import ModelCard

Payload = dict[str, Any]
NO_CALLS: Mapping[str, CallTarget] = {}


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of a request that its response repeats or needs.

    `card` is of the model that answers: what it was called, and by which files its tokens are read.
    A newer release's further members are ignored on reading.
    """

    created_s: int
    card: ModelCard
    parser: ParserConfig = msgspec.field(name="reading")
    input: list[Item]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    text_format: dict[str, Any]
    temperature: float
    top_p: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    background: bool
    store: bool
    parallel_tool_calls: bool
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    has_logprobs: bool = False
    metadata: dict[str, str] = {}
    previous_response_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    service_tier: str = "default"
    calls: dict[str, CallTarget] = {}  # by the model's name of a tool; without a row: a function
    is_compaction: bool = False


def stored_request(
    request: ResponseRequest,
    card: ModelCard,
    parser: ParserConfig,
    items: list[Item],
    created_s: int,
    sampling: SamplingParams,
    calls: Mapping[str, CallTarget] = NO_CALLS,
) -> StoredRequest:
    """Returns the stored form of a request: `items` are its own; `sampling` is its job's."""
    return StoredRequest(
        created_s=created_s,
        card=card,
        parser=parser,
        input=items,
        tools=[_echoed(tool) for tool in request.tools if not is_hosted(tool_payload(tool))],
        tool_choice=_payload(request.tool_choice),
        text_format=_payload(request.text.format or ResponseFormatText(type="text")),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        background=request.background,
        store=request.store,
        parallel_tool_calls=request.parallel_tool_calls,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        top_logprobs=request.top_logprobs,
        has_logprobs=request.wants_logprobs,
        metadata=request.metadata,
        previous_response_id=request.previous_response_id,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        reasoning_effort=request.reasoning.effort,
        service_tier=served_tier(request) or "default",
        calls=dict(calls),
        is_compaction=request.is_compaction,
    )


def encode_request(request: StoredRequest) -> str:
    """Returns the JSON of a request. Raises InvalidParameter when it is too large to be stored."""
    encoded = msgspec.json.encode(request)
    if len(encoded) > MAX_REQUEST_RECORD_BYTES:
        raise InvalidParameter(
            "input",
            f"with instructions and tools it has {len(encoded)} bytes, of which at most "
            f"{MAX_REQUEST_RECORD_BYTES} can be stored; with 'store' false nothing is",
        )
    return encoded.decode()


def decode_request(text: str) -> StoredRequest:
    """Returns a request of its JSON. Raises ValueError for anything else."""
    return msgspec.json.decode(text, type=StoredRequest)


def response_payload(
    request: StoredRequest,
    response_id: str,
    status: str,
    *,
    output: list[Payload],
    usage: Payload | None,
    error: Payload | None,
    incomplete: str | None,
    completed_at: int | None,
) -> Payload:
    """Returns OpenAI's response object. `incomplete`: the reason of an incomplete one.
    `completed_at`: Unix time in seconds; None unless it is completed."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": request.created_s,
        "completed_at": completed_at,
        "status": status,
        "background": request.background,
        "error": error,
        "frequency_penalty": request.frequency_penalty,
        "incomplete_details": None if incomplete is None else {"reason": incomplete},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata,
        "model": request.card.name,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls,
        "presence_penalty": request.presence_penalty,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier,
        "store": request.store,
        "temperature": request.temperature,
        "text": {"format": request.text_format},
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": usage,
        "user": request.user,
    }


def _echoed(tool: RequestModel) -> Payload:
    """Returns a tool with the members that OpenAI's object always has."""
    payload = tool_payload(tool)
    if payload["type"] == "function":
        return {"description": None, "parameters": None, "strict": False, **payload}
    return payload


def _payload(value: Any) -> Any:
    """Returns a part of a request as JSON, as it was sent."""
    if not isinstance(value, RequestModel):
        return value
    return value.model_dump(by_alias=True, exclude_none=True)

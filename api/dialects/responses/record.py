"""StoredRequest: what must be known, beside a job's log, to make its response again.

It is stored with the job, as JSON. A response object is made of it and of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.dialects.responses.calls import CallTarget, Item
from api.dialects.responses.items import PREFIXES
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.tools import is_hosted, tool_payload
from api.generation.protocol import RequestModel, ResponseFormatText, served_tier
from api.ids import item_id
from api.output_parsers.parser import ParserConfig
from shared.messages import MAX_REQUEST_RECORD_BYTES, InvalidParameter, SamplingParams
from shared.text.model_card import ModelCard

Payload = dict[str, Any]
NO_CALLS: Mapping[str, CallTarget] = {}


class StoredRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of a request that its response repeats or needs.

    Those that change with each turn come first and the conversation last: what they have in common
    is stored once (`_in_lines`). `card` is of the model that answers: what it was called, and by
    which files its tokens are read. A newer release's further members are ignored on reading.
    """

    created_s: int
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    card: ModelCard
    parser: ParserConfig = msgspec.field(name="reading")
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
    top_logprobs: int | None = None
    has_logprobs: bool = False
    metadata: dict[str, str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    service_tier: str = "default"
    calls: dict[str, CallTarget] = {}  # by the model's name of a tool; without a row: a function
    is_compaction: bool = False
    tools: list[dict[str, Any]]
    input: list[Item]


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


# A record of more bytes is written as lines, most of which the turns of a conversation share
# (shared/transport/record_parts.py). A smaller one takes less as it is.
MIN_LINES_BYTES = 2048


def encode_request(request: StoredRequest, job_id: str) -> str:
    """Returns the JSON of a request. Raises InvalidParameter when it is too large to be stored."""
    whole = msgspec.json.encode(request)
    kept = whole if len(whole) <= MIN_LINES_BYTES else _in_lines(request, job_id)
    num_bytes = max(len(whole), len(kept))
    if num_bytes > MAX_REQUEST_RECORD_BYTES:
        raise InvalidParameter(
            "input",
            f"with instructions and tools it has {num_bytes} bytes, of which at most "
            f"{MAX_REQUEST_RECORD_BYTES} can be stored; with 'store' false nothing is",
        )
    return kept.decode()


def decode_request(text: str, job_id: str) -> StoredRequest:
    """Returns a request of its JSON. Raises ValueError for anything else."""
    request = msgspec.json.decode(text, type=StoredRequest)
    index = 0
    for position, item in enumerate(request.input):
        index = item.get("id", index)
        if isinstance(index, str):
            return request  # a small one, or an older release's: with ids
        own_id = item_id(PREFIXES[item["type"]], job_id, index, is_input=True)
        request.input[position] = {"id": own_id, **item} | {"id": own_id}
        index += 1
    return request


def _in_lines(request: StoredRequest, job_id: str) -> bytes:
    """Returns the JSON of a request with each tool and each item on a line of its own.

    A line is the same in every turn: ids of items have their response's id in them, and are left
    out. An item behind one that was not kept has its index as `id`.
    """
    items: list[Item] = []
    index = 0
    for item in request.input:
        own_index = int(item["id"].rpartition("_in")[2])
        bare = {name: value for name, value in item.items() if name != "id"}
        items.append(bare if own_index == index else {"id": own_index, **bare})
        index = own_index + 1
    fields: dict[str, Any] = {
        "card": _line(request.card),
        "tools": _lines(request.tools),
        "input": _lines(items),
    }
    if request.instructions is not None:
        fields["instructions"] = _line(request.instructions)
    if request.metadata:
        fields["metadata"] = _line(request.metadata)
    return msgspec.json.encode(msgspec.structs.replace(request, **fields))


def _line(value: Any) -> msgspec.Raw:
    return msgspec.Raw(b"\n" + msgspec.json.encode(value))


def _lines(values: list[dict[str, Any]]) -> msgspec.Raw:
    encoder = msgspec.json.Encoder()
    return msgspec.Raw(b"[\n" + b"\n,".join(map(encoder.encode, values)) + b"\n]")


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

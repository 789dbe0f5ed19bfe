"""ResponseFacts: all that must be known, beside a job's log, to tell its answer again.

They are kept with the job, as JSON. A response object is made of them and of what the log says.
"""

from __future__ import annotations

from typing import Any

import msgspec

from api.dialects.responses.items import Item
from api.dialects.responses.protocol import FunctionTool, ResponseRequest
from api.generation.protocol import RequestModel, ResponseFormatText, served_tier
from api.output_parsers.parser import OutputParser, OutputParserFactory, Thinking
from shared.messages import MAX_REQUEST_RECORD_BYTES, InvalidParameter, SamplingParams
from shared.text.model_card import ModelCard
from shared.text.tool_formats import ReasoningFormat, ToolFormat

Payload = dict[str, Any]


class ReadingFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the answer's text is read: the plain members of a OutputParserFactory."""

    tool_format: ToolFormat | None = None
    names: tuple[str, ...] = ()
    reasoning_format: ReasoningFormat | None = None
    thinking: Thinking = Thinking.NO

    @classmethod
    def of(cls, reading: OutputParserFactory) -> ReadingFacts:
        return cls(
            tool_format=reading.tool_format,
            names=tuple(sorted(reading.names)),
            reasoning_format=reading.reasoning_format,
            thinking=reading.thinking,
        )

    def parser(self, job_id: str) -> OutputParser:
        """Reads the answer of this job; the ids of its calls are made from the job's."""
        return OutputParserFactory(
            tool_format=self.tool_format,
            names=self.names,
            reasoning_format=self.reasoning_format,
            thinking=self.thinking,
            seed=job_id,
        )()


class ResponseFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of a request that its response repeats or needs.

    `card` is of the model that answers: what it was called, and by which files its tokens are read.
    A newer release's further members are ignored on reading.
    """

    created_s: int
    card: ModelCard
    reading: ReadingFacts
    input: list[Item]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    text_format: dict[str, Any]
    temperature: float
    top_p: float
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


def facts_of(
    request: ResponseRequest,
    card: ModelCard,
    reading: OutputParserFactory,
    items: list[Item],
    created_s: int,
    sampling: SamplingParams,
) -> ResponseFacts:
    """Returns what is stored of a request: `items` are its own; `sampling` is its job's."""
    return ResponseFacts(
        created_s=created_s,
        card=card,
        reading=ReadingFacts.of(reading),
        input=items,
        tools=[_shown_tool(tool) for tool in request.tools],
        tool_choice=_payload(request.tool_choice),
        text_format=_payload(request.text.format or ResponseFormatText(type="text")),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
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
    )


def encode_facts(facts: ResponseFacts) -> str:
    """Raises InvalidParameter when they are too large to be kept."""
    encoded = msgspec.json.encode(facts)
    if len(encoded) > MAX_REQUEST_RECORD_BYTES:
        raise InvalidParameter(
            "input",
            f"with instructions and tools it has {len(encoded)} bytes, of which at most "
            f"{MAX_REQUEST_RECORD_BYTES} can be stored; with 'store' false nothing is",
        )
    return encoded.decode()


def decode_facts(text: str) -> ResponseFacts:
    """Raises ValueError for what is no response's facts."""
    return msgspec.json.decode(text, type=ResponseFacts)


def response_payload(
    facts: ResponseFacts,
    response_id: str,
    status: str,
    *,
    output: list[Payload],
    usage: Payload | None,
    error: Payload | None,
    incomplete: str | None,
) -> Payload:
    """Returns OpenAI's response object. `incomplete`: the reason of an incomplete one."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": facts.created_s,
        "status": status,
        "background": facts.background,
        "error": error,
        "incomplete_details": None if incomplete is None else {"reason": incomplete},
        "instructions": facts.instructions,
        "max_output_tokens": facts.max_output_tokens,
        "max_tool_calls": None,
        "metadata": facts.metadata,
        "model": facts.card.name,
        "output": output,
        "parallel_tool_calls": facts.parallel_tool_calls,
        "previous_response_id": facts.previous_response_id,
        "prompt_cache_key": facts.prompt_cache_key,
        "reasoning": {"effort": facts.reasoning_effort, "summary": None},
        "safety_identifier": facts.safety_identifier,
        "service_tier": facts.service_tier,
        "store": facts.store,
        "temperature": facts.temperature,
        "text": {"format": facts.text_format},
        "tool_choice": facts.tool_choice,
        "tools": facts.tools,
        "top_logprobs": facts.top_logprobs or 0,
        "top_p": facts.top_p,
        "truncation": "disabled",
        "usage": usage,
        "user": facts.user,
    }


def _shown_tool(tool: FunctionTool) -> Payload:
    """Returns a tool with the members that OpenAI's object always has."""
    return {"description": None, "parameters": None, "strict": False, **_payload(tool)}


def _payload(value: Any) -> Any:
    """Returns a part of a request as JSON, as it was sent."""
    if not isinstance(value, RequestModel):
        return value
    return value.model_dump(by_alias=True, exclude_none=True)

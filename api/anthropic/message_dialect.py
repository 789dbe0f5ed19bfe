"""MessageDialect: events of a job as a Messages stream, or as one `message`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from api.anthropic.blocks import BlockStream, WholeBlocks
from api.anthropic.errors import error_payload
from api.errors import ApiError
from api.sse import Framing, typed_event, typed_event_pieces
from api.turn.parser import NewParser, PlainParser
from api.turn.reasoning_tokens import ReasoningTokens
from shared.messages import Delta, Finished, FinishReason, Usage

SERVICE_TIER = "standard"  # there is no other
TEXTS_AT_ONCE = 64  # that are read together, where no reader waits for them
_NOT_STOPPED = {"stop_reason": None, "stop_sequence": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFacts:
    """What an answer says of itself before it has begun."""

    id: str  # public id
    model: str
    prompt_tokens: int
    is_cut_by_context: bool = False  # where it ends by its length


class MessageDialect:
    """`new_parser` makes the parser of the answer's text; `thinking_tokens` where it may find
    reasoning."""

    kind = "message"
    framing = Framing(typed_event, typed_event_pieces, b"", typed_event({"type": "ping"}))

    def __init__(
        self,
        facts: MessageFacts,
        new_parser: NewParser = PlainParser,
        thinking_tokens: ReasoningTokens | None = None,
    ) -> None:
        self._facts = facts
        self._parser = new_parser()
        self._thinking_tokens = thinking_tokens
        self._blocks = BlockStream()
        self._num_bytes = 0  # of a streamed text so far
        self._texts: list[str] = []  # collected and not read yet
        self._content = WholeBlocks()  # of whole answers

    def opening(self) -> Sequence[Any]:
        usage = usage_payload(Usage(self._facts.prompt_tokens, 0))
        usage["service_tier"] = SERVICE_TIER
        message = {**self._message(), "content": [], **_NOT_STOPPED, "usage": usage}
        return ({"type": "message_start", "message": message},)

    def before_choice(self, choice: int) -> Sequence[Any]:
        return ()

    def delta(self, delta: Delta) -> Sequence[Any]:
        self._count_thinking(delta)
        if not delta.text:
            return ()
        self._num_bytes += len(delta.text.encode())
        return list(self._blocks.push(self._parser.push(delta.text)))

    def held_bytes(self, choice: int) -> int:
        spans = self._parser.spans
        return 0 if spans is None else self._num_bytes - spans.num_bytes

    def finished(self, end: Finished) -> Sequence[Any]:
        return list(self._ended(end))

    def failed(self, error: ApiError) -> Any:
        return error_payload(error.status, error.message, error.code, error.param, self._facts.id)

    def collect(self, delta: Delta) -> None:
        self._count_thinking(delta)
        self._texts.append(delta.text)
        if len(self._texts) >= TEXTS_AT_ONCE:
            self._read()

    def whole(self, end: Finished) -> Any:
        self._read()
        self._content.take(self._parser.finish())
        return {
            **self._message(),
            "content": self._content.payload(),
            **self._stop(end),
            "usage": {**self._usage(end), "service_tier": SERVICE_TIER},
        }

    def _read(self) -> None:
        self._content.take(self._parser.push("".join(self._texts)))
        self._texts.clear()

    def _ended(self, end: Finished) -> Iterator[dict[str, Any]]:
        yield from self._blocks.push(self._parser.finish())
        yield from self._blocks.close()
        yield {"type": "message_delta", "delta": self._stop(end), "usage": self._usage(end)}
        yield {"type": "message_stop"}

    def _count_thinking(self, delta: Delta) -> None:
        if self._thinking_tokens is not None:
            self._thinking_tokens.push(delta.token_ids)

    def _usage(self, end: Finished) -> dict[str, Any]:
        usage = usage_payload(end.usage)
        if self._thinking_tokens is not None:
            num_tokens = self._thinking_tokens.count(self._parser.reasoning_bytes)
            usage["output_tokens_details"] = {"thinking_tokens": num_tokens}
        return usage

    def _message(self) -> dict[str, Any]:
        facts = self._facts
        return {"id": facts.id, "type": "message", "role": "assistant", "model": facts.model}

    def _stop(self, end: Finished) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence`."""
        if isinstance(end.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        if end.reason is FinishReason.LENGTH:
            by_context = self._facts.is_cut_by_context
            reason = "model_context_window_exceeded" if by_context else "max_tokens"
        else:
            reason = "tool_use" if self._parser.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def usage_payload(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage object: `input_tokens` are those that no cache had.

    Nothing is written to a cache for a price, so `cache_creation_input_tokens` is 0.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }

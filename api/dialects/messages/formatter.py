"""MessageFormatter: events of a job as a Messages stream, or as one `message`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.dialects.messages.errors import error_payload
from api.errors import ApiError
from api.generation.choices import ReasoningTokens
from api.generation.formatter import Formatter
from api.output_parsers.events import Reasoning, Text, ToolArguments, ToolCall, TurnEvent
from api.output_parsers.parser import NewParser, PlainParser
from api.sse import Framing, typed_event, typed_event_pieces
from shared.messages import Delta, Finished, FinishReason, Usage

SERVICE_TIER = "standard"  # there is no other
TEXTS_AT_ONCE = 64  # that are read together, where no reader waits for them
_NOT_STOPPED = {"stop_reason": None, "stop_sequence": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageContext:
    """What an answer says of itself before it has begun."""

    id: str  # public id
    model: str
    prompt_tokens: int
    is_cut_by_context: bool = False  # where it ends by its length


class MessageFormatter(Formatter):
    """`new_parser` makes the parser of the answer's text; `thinking_tokens` where it may find
    reasoning."""

    kind = "message"
    framing = Framing(typed_event, typed_event_pieces, b"", typed_event({"type": "ping"}))

    def __init__(
        self,
        facts: MessageContext,
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

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
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


# Content blocks: what a turn's events are in the Messages dialect, streamed and whole.
#
# A block is a run of one kind: text, thinking, or one call of a tool. There is no signature to
# verify, so a thinking block's is empty.


class BlockStream:
    """Events of a turn in, stream events out: each block is started, filled and stopped in turn."""

    def __init__(self) -> None:
        self._index = -1  # of the latest block
        self._open: str | None = None  # its type, while it is open
        self._call = -1  # the turn's index of the latest tool call

    def push(self, events: Sequence[TurnEvent]) -> Iterator[dict[str, Any]]:
        for event in events:
            match event:
                case Text(text):
                    yield from self._continue({"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    yield from self._continue({"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case ToolCall(index, call_id, name):
                    self._call = index
                    yield from self._start(
                        {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    )
                case ToolArguments(index, text):
                    assert (index, self._open) == (self._call, "tool_use"), "calls come in turn"
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """The turn is over."""
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _continue(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open != block["type"]:
            yield from self._start(block)

    def _start(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class WholeBlocks:
    """The blocks of a turn whose events are taken as they come."""

    def __init__(self) -> None:
        self._stream = BlockStream()
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # of each block

    def take(self, events: Sequence[TurnEvent]) -> None:
        """Keeps what these events add."""
        for event in self._stream.push(events):
            if event["type"] == "content_block_start":
                self._blocks.append(dict(event["content_block"]))
                self._texts.append([])
            elif event["type"] == "content_block_delta":
                _, text = event["delta"].values()
                self._texts[-1].append(text)

    def payload(self) -> list[dict[str, Any]]:
        """The member `content` of a turn that is over.

        A call whose arguments were cut off before they became a JSON object is left out: there is
        no `input` that would distinguish it from one that means something.
        """
        filled = zip(self._blocks, self._texts, strict=True)
        return [block for block, parts in filled if _filled(block, "".join(parts))]


def _filled(block: dict[str, Any], text: str) -> bool:
    """Puts a block's text where it belongs; False when it is no block."""
    if block["type"] != "tool_use":
        block[block["type"]] = (
            text  # a text block's member is `text`, a thinking block's `thinking`
        )
        return True
    try:
        block["input"] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True

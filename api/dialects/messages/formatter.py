"""MessageFormatter: events of a job as a Messages stream, or as one `message`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from api.errors import ApiError
from api.generation.choices import ChoiceEnd, ChoiceEvent, ChoiceReader, ReaderOptions
from api.generation.formatter import Formatter
from api.http.json_response import anthropic_body
from api.http.sse import Framing, typed_event, typed_event_pieces
from api.output_parsers.events import (
    NewParser,
    OutputEvent,
    PlainParser,
    Reasoning,
    Text,
    ToolArguments,
    ToolCall,
)
from shared.messages import Finished, FinishReason, Usage
from shared.text.base import Tokenizer

SERVICE_TIER = "standard"  # there is no other
_NOT_STOPPED = {"stop_reason": None, "stop_sequence": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageContext:
    """What a message has before its first token."""

    id: str  # public id
    model: str
    prompt_tokens: int
    is_cut_by_context: bool = False  # when it ends by its length


class MessageFormatter(Formatter[None]):
    """`new_parser` makes the parser of the text. Given a `tokenizer`, thinking tokens are counted:
    where the parser may find any."""

    kind = "message"
    has_beginning = True
    framing = Framing(typed_event, typed_event_pieces, b"", typed_event({"type": "ping"}))

    def __init__(
        self,
        context: MessageContext,
        new_parser: NewParser = PlainParser,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        options: ReaderOptions[None] = ReaderOptions(
            new_parser=new_parser, tokenizer=tokenizer, counts_reasoning=tokenizer is not None
        )
        super().__init__(ChoiceReader(options))
        self._context = context
        self._blocks = BlockStream()
        self._content = WholeBlocks()  # of a whole message
        self._end: ChoiceEnd | None = None

    def opening(self) -> Sequence[Any]:
        return ()

    def beginning(self, cached_tokens: int) -> Sequence[Any]:
        usage = usage_payload(Usage(self._context.prompt_tokens, 0, cached_tokens))
        usage["service_tier"] = SERVICE_TIER
        message = {**self._message(), "content": [], **_NOT_STOPPED, "usage": usage}
        return ({"type": "message_start", "message": message},)

    def event(self, event: ChoiceEvent[None]) -> Sequence[Any]:
        if event.piece is not None:
            return list(self._blocks.push(event.piece))
        self._end = event.end
        return list(self._blocks.close())

    def closing(self, end: Finished) -> Sequence[Any]:
        stop = {"type": "message_delta", "delta": self._stop(end), "usage": self._usage(end)}
        return (stop, {"type": "message_stop"})

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        request_id = self._context.id
        return anthropic_body(error, request_id)

    def keep(self, event: ChoiceEvent[None]) -> None:
        if event.piece is None:
            self._end = event.end
        else:
            self._content.add(event.piece)

    def body(self, end: Finished) -> Any:
        return {
            **self._message(),
            "content": self._content.payload(),
            **self._stop(end),
            "usage": {**self._usage(end), "service_tier": SERVICE_TIER},
        }

    def _usage(self, end: Finished) -> dict[str, Any]:
        usage = usage_payload(end.usage)
        thinking_tokens = self.reader.reasoning_tokens
        if thinking_tokens is not None:
            usage["output_tokens_details"] = {"thinking_tokens": thinking_tokens}
        return usage

    def _message(self) -> dict[str, Any]:
        context = self._context
        return {"id": context.id, "type": "message", "role": "assistant", "model": context.model}

    def _stop(self, end: Finished) -> dict[str, Any]:
        """Returns `stop_reason` and `stop_sequence`."""
        if isinstance(end.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        if end.reason is FinishReason.LENGTH:
            by_context = self._context.is_cut_by_context
            reason = "model_context_window_exceeded" if by_context else "max_tokens"
        else:
            has_calls = self._end is not None and self._end.has_calls
            reason = "tool_use" if has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def usage_payload(usage: Usage) -> dict[str, Any]:
    """Returns Anthropic's usage object: `input_tokens` are those that no cache had.

    Nothing is written to a cache for a price, so `cache_creation_input_tokens` is 0.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class BlockStream:
    """Formats a turn's pieces as stream events: each content block is started, filled and stopped.

    A block is a run of one kind: text, thinking, or one tool call. There is no signature to verify,
    so a thinking block's is empty.
    """

    def __init__(self) -> None:
        self._index = -1  # of the latest block
        self._open: str | None = None  # its type, while it is open
        self._call = -1  # the turn's index of the latest tool call

    def push(self, piece: OutputEvent) -> Iterator[dict[str, Any]]:
        match piece:
            case Text(text):
                yield from self._continue({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                yield from self._continue({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCall(index, call_id, name):
                self._call = index
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._start(block)
            case ToolArguments(index, text):
                assert (index, self._open) == (self._call, "tool_use"), "calls come in turn"
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Yields the end of the open block."""
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
    """The content blocks of a whole turn, from its pieces."""

    def __init__(self) -> None:
        self._stream = BlockStream()
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # of each block

    def add(self, piece: OutputEvent) -> None:
        """Adds the next piece."""
        for event in self._stream.push(piece):
            if event["type"] == "content_block_start":
                self._blocks.append(dict(event["content_block"]))
                self._texts.append([])
            elif event["type"] == "content_block_delta":
                _, text = event["delta"].values()
                self._texts[-1].append(text)

    def payload(self) -> list[dict[str, Any]]:
        """Returns the member `content` of a turn that is over.

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

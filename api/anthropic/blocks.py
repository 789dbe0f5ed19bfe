"""Content blocks: what a turn's events are in the Messages dialect, streamed and whole.

A block is a run of one kind: text, thinking, or one call of a tool. There is no signature to
verify, so a thinking block's is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from api.turn.events import Reasoning, Text, ToolArguments, ToolCall, TurnEvent


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

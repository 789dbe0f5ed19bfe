"""ResponseOutput: the items of an answer as they grow, and the events that tell of it.

What a model says is, in the order in which it says it, thoughts (a `reasoning` item), text (a
`message` item) and calls (`function_call` items). At most one item is open. Ids come from the job's
id and the item's place, so that every frontend sends the same response.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from api.output_parsers.events import OutputEvent, Reasoning, Text, ToolArguments, ToolCall

Payload = dict[str, Any]
Logprobs = list[msgspec.Raw]  # each a member of the chat dialect's `logprobs.content`

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OpenItem:
    """An item in the making: what it is, and the text of it so far."""

    def __init__(self, kind: str, job_id: str, index: int, **members: Any) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{_PREFIXES[kind]}_{job_id}_{index}"
        self.members = members
        self.texts: list[str] = []
        self.logprobs: Logprobs = []

    def payload(self, status: str) -> Payload:
        """The item as it stands."""
        item: Payload = {"id": self.id, "type": self.kind, "status": status, **self.members}
        if self.kind == "function_call":
            return {**item, "arguments": "".join(self.texts)}
        if self.kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        return {**item, "content": [self.part()]}

    def opened(self) -> Payload:
        """Returns the item before any of its content."""
        item = self.payload("in_progress")
        if self.kind != "function_call":
            item["content"] = []
        return item

    def part(self) -> Payload:
        """The one part of its content."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }


class ResponseOutput:
    """The items so far. Events are payloads without their numbers."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._done: list[Payload] = []
        self._open: OpenItem | None = None

    def items(self, status: str) -> list[Payload]:
        """All items; `status` is that of the one that is open."""
        is_open = [] if self._open is None else [self._open.payload(status)]
        return [*self._done, *is_open]

    def add(self, event: OutputEvent, logprobs: Logprobs) -> Iterator[Payload]:
        """Adds a piece of the output and yields its events; `logprobs` belong to text."""
        match event:
            case Text(text=text):
                yield from self._in("message")
                yield from self._text_delta(text, logprobs)
            case Reasoning(text=text):
                yield from self._in("reasoning")
                yield self._delta("response.reasoning_text.delta", text, content_index=0)
            case ToolCall(call_id=call_id, name=name):
                yield from self._call(call_id, name)
            case ToolArguments(text=text):
                yield self._delta("response.function_call_arguments.delta", text)

    def end(self, *, is_complete: bool) -> Iterator[Payload]:
        """Closes what is open. A response without any output has a message without text."""
        if self._open is None and not self._done:
            yield from self._begin(OpenItem("message", self._job_id, 0))
        yield from self._close("completed" if is_complete else "incomplete")

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Entries of tokens that end the text and have none of it."""
        if self._open is not None and self._open.kind == "message":
            self._open.logprobs += logprobs

    def _in(self, kind: str) -> Iterator[Payload]:
        """An open item of this kind."""
        if self._open is not None and self._open.kind == kind:
            return
        yield from self._close("completed")
        yield from self._begin(OpenItem(kind, self._job_id, len(self._done)))

    def _call(self, call_id: str, name: str) -> Iterator[Payload]:
        yield from self._close("completed")
        index = len(self._done)
        call = OpenItem("function_call", self._job_id, index, call_id=call_id, name=name)
        yield from self._begin(call)

    def _begin(self, item: OpenItem) -> Iterator[Payload]:
        self._open = item
        yield {
            "type": "response.output_item.added",
            "output_index": item.index,
            "item": item.opened(),
        }
        if item.kind != "function_call":
            yield self._part_event("added", item)

    def _text_delta(self, text: str, logprobs: Logprobs) -> Iterator[Payload]:
        assert self._open is not None
        self._open.logprobs += logprobs
        delta = self._delta("response.output_text.delta", text, content_index=0)
        delta["logprobs"] = logprobs
        yield delta

    def _delta(self, kind: str, text: str, **place: int) -> Payload:
        item = self._open
        assert item is not None
        item.texts.append(text)
        return {
            "type": kind,
            "item_id": item.id,
            "output_index": item.index,
            **place,
            "delta": text,
        }

    def _close(self, status: str) -> Iterator[Payload]:
        item, self._open = self._open, None
        if item is None:
            return
        done = item.payload(status)
        self._done.append(done)
        place = {"item_id": item.id, "output_index": item.index}
        if item.kind == "function_call":
            yield {
                "type": "response.function_call_arguments.done",
                **place,
                "name": done["name"],
                "arguments": done["arguments"],
            }
        else:
            yield _text_done(item.kind, place, done["content"][0])
            yield self._part_event("done", item)
        yield {"type": "response.output_item.done", "output_index": item.index, "item": done}

    def _part_event(self, what: str, item: OpenItem) -> Payload:
        return {
            "type": f"response.content_part.{what}",
            "item_id": item.id,
            "output_index": item.index,
            "content_index": 0,
            "part": item.part(),
        }


def _text_done(kind: str, place: Payload, part: Payload) -> Payload:
    if kind == "reasoning":
        return {
            "type": "response.reasoning_text.done",
            **place,
            "content_index": 0,
            "text": part["text"],
        }
    return {
        "type": "response.output_text.done",
        **place,
        "content_index": 0,
        "text": part["text"],
        "logprobs": part["logprobs"],
    }

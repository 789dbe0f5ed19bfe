"""ResponseOutput: the items of a response as they grow, and the events of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from api.dialects.responses.calls import (
    BUILT_IN,
    CUSTOM,
    FUNCTION,
    CallTarget,
    CustomInput,
    built_item,
)
from api.dialects.responses.items import PREFIXES, encoded_content
from api.ids import item_id
from api.output_parsers.events import OutputEvent, Reasoning, Text, ToolArguments, ToolCall

Payload = dict[str, Any]
Logprobs = list[msgspec.Raw]  # each a member of the chat dialect's `logprobs.content`


class OpenText:
    """A message or a reasoning in the making."""

    def __init__(self, kind: str, job_id: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.id = item_id(PREFIXES[kind], job_id, index)
        self.logprobs: Logprobs = []
        self._texts: list[str] = []

    def add(self, text: str, logprobs: Logprobs) -> Payload:
        """Returns the event of a piece."""
        self._texts.append(text)
        self.logprobs += logprobs
        place = {"item_id": self.id, "output_index": self.index, "content_index": 0}
        if self.kind == "reasoning":
            return {"type": "response.reasoning_text.delta", **place, "delta": text}
        delta = {"type": "response.output_text.delta", **place, "delta": text}
        return {**delta, "logprobs": logprobs}

    def opening(self) -> Iterator[Payload]:
        """Yields the events of the item and its part before any text."""
        item = {**self.payload("in_progress"), "content": []}
        yield {"type": "response.output_item.added", "output_index": self.index, "item": item}
        yield self._part_event("added")

    def closing(self, done: Payload) -> Iterator[Payload]:
        """Yields the events that end its part and itself."""
        place = {"item_id": self.id, "output_index": self.index, "content_index": 0}
        text = "".join(self._texts)
        if self.kind == "reasoning":
            yield {"type": "response.reasoning_text.done", **place, "text": text}
        else:
            logprobs = done["content"][0]["logprobs"]
            end = {"type": "response.output_text.done", **place, "text": text}
            yield {**end, "logprobs": logprobs}
        yield self._part_event("done")
        yield {"type": "response.output_item.done", "output_index": self.index, "item": done}

    def payload(self, status: str) -> Payload:
        """Returns the item as it stands."""
        item: Payload = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        return {**item, "content": [self._part()]}

    def _part(self) -> Payload:
        text = "".join(self._texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def _part_event(self, what: str) -> Payload:
        return {
            "type": f"response.content_part.{what}",
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "part": self._part(),
        }


class OpenCall:
    """A call in the making, of a function or a custom tool."""

    def __init__(self, target: CallTarget, job_id: str, index: int, call_id: str) -> None:
        is_custom = target.kind == CUSTOM
        self.kind = "custom_tool_call" if is_custom else "function_call"
        self.index = index
        self.id = item_id(PREFIXES[self.kind], job_id, index)
        self.member = "input" if is_custom else "arguments"
        names = {"name": target.name}
        if target.namespace is not None:
            names["namespace"] = target.namespace
        self._members: Payload = {"call_id": call_id, **names}
        self._texts: list[str] = []
        self._input = CustomInput() if is_custom else None

    @property
    def _event(self) -> str:
        return f"response.{'custom_tool_call_input' if self._input else 'function_call_arguments'}"

    def add(self, text: str) -> Iterator[Payload]:
        """Yields the event of a piece of the arguments."""
        yield from self._delta(text if self._input is None else self._input.add(text))

    def opening(self) -> Iterator[Payload]:
        """Yields the event of the item without arguments."""
        item = self.payload("in_progress")
        yield {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def end(self) -> Iterator[Payload]:
        """Yields the event of the rest, once the arguments have ended."""
        if self._input is not None:
            yield from self._delta(self._input.end())

    def closing(self, done: Payload) -> Iterator[Payload]:
        """Yields the events that end it."""
        end = {"type": f"{self._event}.done", "item_id": self.id, "output_index": self.index}
        if self._input is None:
            end["name"] = done["name"]
        yield {**end, self.member: done[self.member]}
        yield {"type": "response.output_item.done", "output_index": self.index, "item": done}

    def payload(self, status: str) -> Payload:
        """Returns the item as it stands."""
        item = {"id": self.id, "type": self.kind, "status": status, **self._members}
        return {**item, self.member: "".join(self._texts)}

    def _delta(self, text: str) -> Iterator[Payload]:
        if not text:
            return
        self._texts.append(text)
        place = {"item_id": self.id, "output_index": self.index}
        yield {"type": f"{self._event}.delta", **place, "delta": text}


class OpenBuiltIn:
    """A call of a built-in tool in the making. Its item has no text that could grow: its events
    come when it is whole. Arguments that are not such a tool's become a function call."""

    def __init__(self, target: CallTarget, job_id: str, index: int, call_id: str) -> None:
        self.kind = target.kind
        self.index = index
        self._job_id = job_id
        self._call_id = call_id
        self._texts: list[str] = []

    def add(self, text: str) -> Iterator[Payload]:
        """Keeps a piece of the arguments. Yields nothing."""
        self._texts.append(text)
        return iter(())

    def opening(self) -> Iterator[Payload]:
        """Yields nothing."""
        return iter(())

    def end(self) -> Iterator[Payload]:
        """Yields nothing."""
        return iter(())

    def closing(self, done: Payload) -> Iterator[Payload]:
        """Yields the events of the whole item."""
        opened = {**done, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": self.index, "item": opened}
        yield {"type": "response.output_item.done", "output_index": self.index, "item": done}

    def payload(self, status: str) -> Payload:
        """Returns the item as it stands."""
        arguments = "".join(self._texts)
        built = built_item(self.kind, arguments)
        if built is None:
            built = {"type": "function_call", "name": self.kind, "arguments": arguments}
        own_id = item_id(PREFIXES[built["type"]], self._job_id, self.index)
        kind = {"id": own_id, "type": built.pop("type"), "status": status}
        return {**kind, "call_id": self._call_id, **built}


class OpenCompaction(OpenText):
    """A summary in the making. Its item has no text that could grow: its events come when it is
    whole."""

    def __init__(self, job_id: str) -> None:
        super().__init__("compaction", job_id, 0)

    def opening(self) -> Iterator[Payload]:
        """Yields nothing."""
        return iter(())

    def closing(self, done: Payload) -> Iterator[Payload]:
        """Yields the events of the whole item."""
        yield {"type": "response.output_item.added", "output_index": self.index, "item": done}
        yield {"type": "response.output_item.done", "output_index": self.index, "item": done}

    def payload(self, status: str) -> Payload:
        """Returns the item as it stands."""
        text = "".join(self._texts)
        return {"id": self.id, "type": self.kind, "encrypted_content": encoded_content(text)}


class ResponseOutput:
    """The items of an output as they grow, and the events of it, payloads without their numbers.

    Reasoning, text and calls are items in the order in which the model writes them; at most one is
    open. Ids come from the job's id and the item's place: every frontend sends the same response.
    """

    def __init__(
        self,
        job_id: str,
        calls: Mapping[str, CallTarget],
        *,
        is_compaction: bool = False,
    ) -> None:
        """`calls`: what a call becomes, by the model's name of the tool; else a function call.
        `is_compaction`: the text is a summary, and the one item."""
        self._job_id = job_id
        self._calls = calls
        self._done: list[Payload] = []
        self._open: OpenText | OpenCall | OpenBuiltIn | None = None
        self._summary = OpenCompaction(job_id) if is_compaction else None

    def items(self, status: str) -> list[Payload]:
        """Returns all items; `status` is that of the one that is open."""
        is_open = [] if self._open is None else [self._open.payload(status)]
        return [*self._done, *is_open]

    def add(self, event: OutputEvent, logprobs: Logprobs) -> Iterator[Payload]:
        """Adds a piece of the output and yields its events; `logprobs` belong to text."""
        if self._summary is not None:
            if isinstance(event, Text):
                self._summary.add(event.text, [])
            return
        match event:
            case Text(text=text):
                yield from self._in("message", text, logprobs)
            case Reasoning(text=text):
                yield from self._in("reasoning", text, [])
            case ToolCall(call_id=call_id, name=name):
                yield from self._call(call_id, name)
            case ToolArguments(text=text):
                assert isinstance(self._open, OpenCall | OpenBuiltIn)
                yield from self._open.add(text)

    def end(self, *, is_complete: bool) -> Iterator[Payload]:
        """Closes the open item. A response without any output has a message without text."""
        if self._summary is not None:
            self._open = self._summary
        elif self._open is None and not self._done:
            yield from self._begin(OpenText("message", self._job_id, 0))
        yield from self._close("completed" if is_complete else "incomplete")

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Entries of tokens that end the text and have none of it."""
        if isinstance(self._open, OpenText) and self._open.kind == "message":
            self._open.logprobs += logprobs

    def _in(self, kind: str, text: str, logprobs: Logprobs) -> Iterator[Payload]:
        """Yields the events of a piece of text, and before them those that open its item."""
        item = self._open
        if not isinstance(item, OpenText) or item.kind != kind:
            yield from self._close("completed")
            item = OpenText(kind, self._job_id, len(self._done))
            yield from self._begin(item)
        yield item.add(text, logprobs)

    def _call(self, call_id: str, name: str) -> Iterator[Payload]:
        yield from self._close("completed")
        target = self._calls.get(name) or CallTarget(FUNCTION, name)
        kind = OpenBuiltIn if target.kind in BUILT_IN else OpenCall
        yield from self._begin(kind(target, self._job_id, len(self._done), call_id))

    def _begin(self, item: OpenText | OpenCall | OpenBuiltIn) -> Iterator[Payload]:
        self._open = item
        yield from item.opening()

    def _close(self, status: str) -> Iterator[Payload]:
        item, self._open = self._open, None
        if item is None:
            return
        if not isinstance(item, OpenText):
            yield from item.end()
        done = item.payload(status)
        self._done.append(done)
        yield from item.closing(done)

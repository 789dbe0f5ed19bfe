"""ResponseFormatter: a job's log as the events of a response, or as one response object.

Events and their numbers are a function of the stored request, the tokens and the text alone, not of
how the log or the bus cut these up: any frontend sends the same stream at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from api.dialects.responses.record import StoredRequest, response_payload
from api.errors import ApiError, job_failed
from api.generation.choices import ChoiceEvent, ChoiceReader, ReaderOptions
from api.generation.formatter import Formatter
from api.generation.logprobs import ChatEntryForm
from api.http.sse import TYPED
from api.ids import public_id
from api.output_parsers.events import OutputEvent, Reasoning, Text, ToolArguments, ToolCall
from api.output_parsers.parser import OutputParserFactory
from shared.messages import Delta, ErrorCode, Failed, Finished, FinishReason, JobState, Usage
from shared.text.base import Tokenizer

Payload = dict[str, Any]

# Errors of a reader: the response did not end with them.
READERS_ERRORS = frozenset({ErrorCode.STREAM_DIVERGED, ErrorCode.JOB_LOST})

_INVALID_PROMPT = frozenset({ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.KV_CAPACITY_EXCEEDED})


class ResponseFormatter(Formatter[msgspec.Raw]):
    """Numbers its events; leaves out those that the reader has.

    `failed` ends a stream and not the response. Its event has the number of the last one that its
    reader has: a reader that resumes behind it misses nothing and gets nothing twice.
    """

    kind = "response"
    framing = TYPED

    def __init__(
        self,
        request: StoredRequest,
        job_id: str,
        tokenizer: Tokenizer,
        starting_after: int | None = None,
    ) -> None:
        """`starting_after`: the number of the last event that the reader has already."""
        self._num_events = 0  # made so far
        self._num_known = 0 if starting_after is None else starting_after + 1
        self._request = request
        self._id = public_id(self.kind, job_id)
        options = ReaderOptions(
            new_parser=OutputParserFactory(request.parser, job_id),
            tokenizer=tokenizer,
            form=ChatEntryForm(tokenizer),
            counts_reasoning=True,
            splits_by_token=True,
        )
        super().__init__(ChoiceReader(options))
        self._output = ResponseOutput(job_id)
        self._has_begun = not request.background

    def opening(self) -> Sequence[Payload]:
        waiting = ("queued", "in_progress")[self._has_begun]
        names = ("response.created", f"response.{waiting}")
        return self._numbered({"type": name, "response": self._response(waiting)} for name in names)

    def delta(self, delta: Delta) -> Sequence[Payload]:
        begin = self._begin()
        return self._numbered((*begin, *super().delta(delta)))

    def event(self, event: ChoiceEvent[msgspec.Raw]) -> Sequence[Payload]:
        logprobs = [placed.entry for placed in event.logprobs]
        if event.piece is None:
            self._output.add_logprobs(logprobs)
            return ()
        return list(self._output.add(event.piece, logprobs))

    def finished(self, end: Finished) -> Sequence[Payload]:
        begin = self._begin()
        return self._numbered((*begin, *super().finished(end)))

    def closing(self, end: Finished) -> Sequence[Payload]:
        events = list(self._output.end(is_complete=end.reason is FinishReason.STOP))
        response = self._finished_response(end)
        return [*events, {"type": f"response.{response['status']}", "response": response}]

    def job_failed(self, end: Failed, *, delivered: bool) -> Sequence[Payload]:
        if end.code in READERS_ERRORS:
            last_number = max(self._num_events, self._num_known) - 1
            return (self._error_event(job_failed(end, delivered=True), last_number),)
        response = self.failed_response(end)
        event = {"type": "response.failed", "response": {**response, "error": _error_of(end)}}
        return self._numbered((event,))

    def failed(self, error: ApiError, last_sent: Any = None) -> Payload:
        return self._error_event(error, self._last_number(last_sent))

    def resume_hint(self, last_sent: Any) -> str | None:
        if not self._request.store:
            return None
        url, number = f"GET /v1/responses/{self._id}?stream=true", self._last_number(last_sent)
        if number >= 0:
            url += f"&starting_after={number}"
        return f"{url} goes on from here."

    def _last_number(self, last_sent: Any) -> int:
        """Returns the number of the last event that the reader has; -1 before the first."""
        return self._num_known - 1 if last_sent is None else int(last_sent["sequence_number"])

    def _error_event(self, error: ApiError, last_number: int) -> Payload:
        return {
            "type": "error",
            "sequence_number": max(0, last_number),
            "code": error.code,
            "message": error.message,
            "param": error.param,
        }

    def keep(self, event: ChoiceEvent[msgspec.Raw]) -> None:
        self.event(event)  # the items are made with their events

    def body(self, end: Finished) -> Payload:
        for _ in self._output.end(is_complete=end.reason is FinishReason.STOP):
            pass
        return self._finished_response(end)

    def failed_response(self, end: Failed) -> Payload:
        """Returns the response object of a job that did not finish."""
        for event in self.reader.finish(end):
            self.keep(event)
        is_cancelled = end.state is JobState.CANCELLED
        return self._response(
            "cancelled" if is_cancelled else "failed",
            usage=self._usage(end.usage),
            error=None if is_cancelled else _error_of(end),
            item_status="incomplete",
        )

    def so_far(self, *, has_started: bool) -> Payload:
        """Returns the response object of a job that has not ended."""
        return self._response("in_progress" if has_started else "queued")

    def _begin(self) -> Sequence[Payload]:
        """Returns the event of a background response that has left the queue, once."""
        if self._has_begun:
            return ()
        self._has_begun = True
        return ({"type": "response.in_progress", "response": self._response("in_progress")},)

    def _finished_response(self, end: Finished) -> Payload:
        is_complete = end.reason is FinishReason.STOP
        return self._response(
            "completed" if is_complete else "incomplete",
            usage=self._usage(end.usage),
            incomplete=None if is_complete else "max_output_tokens",
        )

    def _usage(self, usage: Usage) -> Payload:
        reasoning_tokens = self.reader.reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }

    def _response(
        self,
        status: str,
        *,
        usage: Payload | None = None,
        error: Payload | None = None,
        incomplete: str | None = None,
        item_status: str = "in_progress",
    ) -> Payload:
        return response_payload(
            self._request,
            self._id,
            status,
            output=self._output.items(item_status),
            usage=usage,
            error=error,
            incomplete=incomplete,
        )

    def _numbered(self, events: Iterable[Payload]) -> list[Payload]:
        """Returns the events with their numbers, but for those that the reader has."""
        numbered = []
        for event in events:
            if self._num_events >= self._num_known:
                number = {"type": event["type"], "sequence_number": self._num_events}
                numbered.append({**number, **event})
            self._num_events += 1
        return numbered


def _error_of(end: Failed) -> Payload:
    """Returns an error with one of OpenAI's codes, for typed clients; `type` is Penstock's."""
    return {
        "code": "invalid_prompt" if end.code in _INVALID_PROMPT else "server_error",
        "message": end.message or f"The job ended as {end.state.value}: {end.code}.",
        "type": end.code,
    }


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
        """Returns the item as it stands."""
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
        """Returns the one part of its content."""
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
    """The items of an output as they grow, and the events of it, payloads without their numbers.

    Reasoning, text and calls are items in the order in which the model writes them; at most one is
    open. Ids come from the job's id and the item's place: every frontend sends the same response.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._done: list[Payload] = []
        self._open: OpenItem | None = None

    def items(self, status: str) -> list[Payload]:
        """Returns all items; `status` is that of the one that is open."""
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
        """Yields the events after which an item of this kind is open."""
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

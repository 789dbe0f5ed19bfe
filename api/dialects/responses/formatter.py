"""ResponseFormatter: a job's log as the events of a response, or as one response object.

Events and their numbers are a function of the stored request, the tokens and the text alone, not of
how the log or the bus cut these up: any frontend sends the same stream at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from api.dialects.responses.output import ResponseOutput
from api.dialects.responses.record import StoredRequest, response_payload
from api.errors import ApiError, job_failed
from api.generation.choices import ChoiceEvent, ChoiceReader, ReaderOptions
from api.generation.formatter import Formatter
from api.generation.logprobs import ChatEntryForm
from api.http.sse import TYPED
from api.ids import public_id
from api.output_parsers.parser import OutputParserFactory
from shared.messages import Delta, ErrorCode, Failed, Finished, FinishReason, JobState, Usage
from shared.text.base import Tokenizer

Payload = dict[str, Any]

# Errors of a reader: the response did not end with them.
READERS_ERRORS = frozenset({ErrorCode.STREAM_DIVERGED, ErrorCode.JOB_LOST, ErrorCode.JOB_EXPIRED})

_INVALID_PROMPT = frozenset({ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.KV_CAPACITY_EXCEEDED})


class ResponseFormatter(Formatter[msgspec.Raw]):
    """Numbers its events; leaves out those that the reader has.

    `failed` ends a stream and not the response. Its event has the number of the last one that its
    reader has: a reader that resumes after it misses nothing and gets nothing twice.
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
        self._output = ResponseOutput(
            job_id,
            request.calls,
            is_compaction=request.is_compaction,
        )
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
        return f"{url} continues from here."

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

    def warm_up(self, num_prompt_tokens: int, now_ms: int) -> Sequence[Payload]:
        """Returns the events of a turn that was checked and is not generated."""
        usage = self._usage(Usage(num_prompt_tokens, 0))
        done = self._response("completed", usage=usage, completed_ms=now_ms)
        created = {"type": "response.created", "response": self._response("in_progress")}
        return self._numbered((created, {"type": "response.completed", "response": done}))

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
            completed_ms=end.ended_ms if is_complete else None,
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
        completed_ms: int | None = None,
    ) -> Payload:
        return response_payload(
            self._request,
            self._id,
            status,
            output=self._output.items(item_status),
            usage=usage,
            error=error,
            incomplete=incomplete,
            completed_at=None if completed_ms is None else completed_ms // 1000,
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


class CompactionFormatter(ResponseFormatter):
    """The answer of POST /v1/responses/compact."""

    def whole(self, end: Finished) -> Payload:
        """Returns the compacted conversation."""
        response = super().whole(end)
        members = ("id", "created_at", "output", "usage")
        return {"object": "response.compaction", **{name: response[name] for name in members}}


def _error_of(end: Failed) -> Payload:
    """Returns an error with one of OpenAI's codes, for typed clients; `type` is Penstock's."""
    return {
        "code": "invalid_prompt" if end.code in _INVALID_PROMPT else "server_error",
        "message": end.message or f"The job ended as {end.state.value}: {end.code}.",
        "type": end.code,
    }

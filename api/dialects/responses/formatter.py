"""ResponseDialect: a job's log as the events of a response, or as one response object.

Events and their numbers are a function of the facts, the tokens and the text alone, not of how the
log or the bus cut these up: any frontend tells the same stream at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from api.dialects.responses.output import Logprobs, ResponseOutput
from api.dialects.responses.pieces import Placed, TokenPieces
from api.dialects.responses.record import ResponseFacts, response_payload
from api.errors import ApiError, job_failed
from api.ids import public_id
from api.output_parsers.events import Text, TurnEvent
from api.sse import TYPED
from shared.messages import Delta, ErrorCode, Failed, Finished, FinishReason, JobState, Usage
from shared.text.base import Tokenizer

Payload = dict[str, Any]

# A reader's own troubles: the response did not end so.
READERS_ERRORS = frozenset({ErrorCode.STREAM_DIVERGED, ErrorCode.JOB_LOST})

_INVALID_PROMPT = frozenset({ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.KV_CAPACITY_EXCEEDED})


class ResponseDialect:
    """One response in the making.

    `ended` takes the place of `finished` where the job did not end by itself; `failed` says what
    ends a stream and not the response. That event has the number of the last one that its reader
    has: whoever asks for what comes after it misses nothing and gets nothing twice.
    """

    kind = "response"
    framing = TYPED

    def __init__(self, facts: ResponseFacts, job_id: str, tokenizer: Tokenizer) -> None:
        self.num_events = 0  # told here
        self.num_known = 0  # that the reader has from elsewhere
        self._facts = facts
        self._id = public_id(self.kind, job_id)
        self._parser = facts.reading.parser(job_id)
        self._pieces = TokenPieces(tokenizer)
        self._output = ResponseOutput(job_id)
        self._placed: list[Placed] = []  # of pieces that became no text yet
        self._has_begun = not facts.background

    @property
    def last_number(self) -> int:
        """Of the last event that the reader has; -1 before the first."""
        return max(self.num_events, self.num_known) - 1

    def opening(self) -> Sequence[Payload]:
        waiting = ("queued", "in_progress")[self._has_begun]
        names = ("response.created", f"response.{waiting}")
        return [self._numbered({"type": name, "response": self._said(waiting)}) for name in names]

    def before_choice(self, choice: int) -> Sequence[Payload]:
        return ()

    def delta(self, delta: Delta) -> Sequence[Payload]:
        return [self._numbered(event) for event in self._events(delta)]

    def held_bytes(self, choice: int) -> int:
        spans, pieces = self._parser.spans, self._pieces
        return pieces.num_bytes - (pieces.num_given if spans is None else spans.num_bytes)

    def finished(self, end: Finished) -> Sequence[Payload]:
        events = list(self._last_events(end))
        response = self._finished_response(end)
        last = {"type": f"response.{response['status']}", "response": response}
        return [self._numbered(event) for event in (*events, last)]

    def ended(self, end: Failed) -> Sequence[Payload]:
        """The last event of a response that failed or was cancelled."""
        if end.code in READERS_ERRORS:
            return (self.failed(job_failed(end, delivered=self.num_events > 0)),)
        response = self.failed_response(end)
        event = {"type": "response.failed", "response": {**response, "error": _error_of(end)}}
        return (self._numbered(event),)

    def failed(self, error: ApiError) -> Payload:
        return {
            "type": "error",
            "sequence_number": max(0, self.last_number),
            "code": error.code,
            "message": error.message,
            "param": error.param,
        }

    def collect(self, delta: Delta) -> None:
        for _ in self._events(delta):
            pass

    def whole(self, end: Finished) -> Payload:
        for _ in self._last_events(end):
            pass
        return self._finished_response(end)

    def failed_response(self, end: Failed) -> Payload:
        """The response object of a job that did not end by itself."""
        for _ in self._rest(stopped=False):
            pass
        is_cancelled = end.state is JobState.CANCELLED
        return self._said(
            "cancelled" if is_cancelled else "failed",
            usage=self._usage(end.usage),
            error=None if is_cancelled else _error_of(end),
            item_status="incomplete",
        )

    def so_far(self, *, has_started: bool) -> Payload:
        """The response object of a job that has not ended."""
        return self._said("in_progress" if has_started else "queued")

    def _events(self, delta: Delta) -> Iterator[Payload]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "response.in_progress", "response": self._said("in_progress")}
        for piece in self._pieces.push(delta):
            self._placed += piece.placed
            yield from self._tell(self._parser.push(piece.text))

    def _last_events(self, end: Finished) -> Iterator[Payload]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "response.in_progress", "response": self._said("in_progress")}
        yield from self._rest(stopped=end.reason is FinishReason.STOP)
        yield from self._output.end(is_complete=end.reason is FinishReason.STOP)

    def _rest(self, *, stopped: bool) -> Iterator[Payload]:
        """What was held back, now that the text has ended."""
        rest = self._pieces.rest(stopped=stopped)
        self._placed += rest.placed
        if rest.text:
            yield from self._tell(self._parser.push(rest.text))
        yield from self._tell(self._parser.finish())
        self._output.add_logprobs(self._logprobs())

    def _tell(self, events: Iterable[TurnEvent]) -> Iterator[Payload]:
        for event in events:
            logprobs = self._logprobs() if isinstance(event, Text) else []
            yield from self._output.say(event, logprobs)

    def _logprobs(self) -> Logprobs:
        """Of tokens that are text and not told yet, in OpenAI's members."""
        spans, placed = self._parser.spans, self._placed
        self._placed = []
        if spans is not None:
            # What the parser holds back may become text yet.
            self._placed = [one for one in placed if one.end_bytes > spans.num_bytes]
            placed = [
                one
                for one in placed
                if one.end_bytes <= spans.num_bytes and spans.holds(one.start_bytes, one.end_bytes)
            ]
        return [one.entry for one in placed]

    def _finished_response(self, end: Finished) -> Payload:
        is_complete = end.reason is FinishReason.STOP
        return self._said(
            "completed" if is_complete else "incomplete",
            usage=self._usage(end.usage),
            incomplete=None if is_complete else "max_output_tokens",
        )

    def _usage(self, usage: Usage) -> Payload:
        reasoning_tokens = self._pieces.num_tokens_before(self._parser.reasoning_bytes)
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

    def _said(
        self,
        status: str,
        *,
        usage: Payload | None = None,
        error: Payload | None = None,
        incomplete: str | None = None,
        item_status: str = "in_progress",
    ) -> Payload:
        return response_payload(
            self._facts,
            self._id,
            status,
            output=self._output.items(item_status),
            usage=usage,
            error=error,
            incomplete=incomplete,
        )

    def _numbered(self, event: Payload) -> Payload:
        numbered = {"type": event["type"], "sequence_number": self.num_events, **event}
        self.num_events += 1
        return numbered


def _error_of(end: Failed) -> Payload:
    """OpenAI's few codes, which typed clients know; ours is the `type`."""
    return {
        "code": "invalid_prompt" if end.code in _INVALID_PROMPT else "server_error",
        "message": end.message or f"The job ended as {end.state.value}: {end.code}.",
        "type": end.code,
    }

"""TailEvents: an existing job as server-sent events with ids, for any number of readers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from api.errors import ApiError, job_failed
from api.generation.formatter import usage_payload
from api.http import sse
from api.jobs.attached_job import AttachedJob
from api.jobs.reader_position import NOTHING, Diverged, Extent, ResumePoint, resume_hint
from api.jobs.sent_events import split_by_segment, split_long
from api.jobs.service import JobService
from api.jobs.stream_response import EventStreamBody, StreamResponse
from shared.choice_deltas import ChoiceDelta, segment_deltas
from shared.messages import Cursor, Delta, ErrorCode, Failed, Finished
from shared.transport.ports.jobs import JobRecord

log = logging.getLogger(__name__)


def tail_response(jobs: JobService, record: JobRecord, after: ResumePoint) -> StreamResponse:
    """Returns the response that streams a job from a resume point to its end."""
    source = AttachedJob(jobs, record, after.cursor, has_short_end=True)
    events = TailEvents(record.job_id, after, has_several_choices=record.num_choices > 1)
    return StreamResponse(jobs, source, EventStreamBody(jobs, events))


class TailEvents:
    """An event per segment of the log, and the end.

    They depend on the log alone, and on what the reader has ahead of its cursor. An event's id is
    the resume point after it; the end has the id of the log's last entry. An error that is not the
    job's own end (an outage, this frontend's shutdown) has none, so that a reader that reconnects
    resumes where it was.
    """

    framing = sse.PLAIN
    has_ids = True

    def __init__(self, job_id: str, after: ResumePoint, *, has_several_choices: bool) -> None:
        self._job_id = job_id
        self._after = after
        self._has_several = has_several_choices
        self._ahead = AheadTrimmer(after.ahead)
        self._encoded = self._sent = after  # after the last event that was encoded, and sent
        self._token_ids: list[int] = []  # without text so far

    def opening(self) -> Iterator[bytes]:
        return iter(())

    def delta(self, delta: Delta, num_waiting: int) -> Iterator[bytes]:
        """Raises ApiError when the reader's resume point is not one of this log."""
        has_choices = self._has_several and delta.segments is not None
        try:
            for part in split_long(delta):  # splitting a long one takes time as well
                yield from self._choice_events(part) if has_choices else self._text_events(part)
        except Diverged as error:
            log.error(
                "a stream no longer matches its job's log and was aborted",
                extra={"job_id": self._job_id, "detail": str(error)},
            )
            raise ApiError(
                500,
                "The job's log does not continue what this reader has: its id is not of this "
                "stream.",
                kind="server_error",
                code=ErrorCode.STREAM_DIVERGED,
                should_retry=False,
            ) from error

    def ending(self, end: Finished | Failed, *, is_small: bool) -> Iterator[bytes]:
        """Yields the last event; its tokens are those that stand for no text.

        With several choices `finish_reason` is `length` if one of them was cut.
        """
        end_id = f"{end.end.num_tokens + 1}-0"
        if isinstance(end, Finished):
            payload = {
                **_text_payload("", self._token_ids),
                "done": True,
                "finish_reason": end.reason.value,
                "stop_reason": end.stop_reason,
                "usage": usage_payload(end.usage),
            }
            yield sse.event(payload, end_id)
            return
        error = job_failed(end, delivered=self._after != ResumePoint())
        is_durable = end.code not in (ErrorCode.STREAM_DIVERGED, ErrorCode.JOB_EXPIRED)
        yield sse.event(_error_payload(error), end_id if is_durable else None)

    def failed(self, error: ApiError) -> bytes:
        return sse.event(_error_payload(error))

    def mark_sent(self) -> None:
        self._sent = self._encoded

    def resume_hint(self, job_id: str) -> str:
        return resume_hint(job_id, self._sent)

    def _text_events(self, delta: Delta) -> Iterator[bytes]:
        """Yields an event for each segment that has text."""
        for piece in split_by_segment(delta):
            rest = self._ahead.rest_of(ChoiceDelta(0, piece.token_ids, piece.text))
            if rest is None:
                continue
            self._token_ids.extend(rest.token_ids)
            if rest.text:
                payload = _text_payload(rest.text, self._token_ids)
                self._token_ids = []
                yield self._event(payload, piece.end)

    def _choice_events(self, delta: Delta) -> Iterator[bytes]:
        """Yields an event for each segment: a reader may resume between any two."""
        cursor = delta.start
        for part in segment_deltas(delta):
            cursor = Cursor(
                cursor.num_tokens + len(part.token_ids), cursor.num_bytes + len(part.text.encode())
            )
            rest = self._ahead.rest_of(part)
            if rest is not None:
                yield self._event(_choice_payload(rest), cursor)

    def _event(self, payload: dict[str, Any], cursor: Cursor) -> bytes:
        """Returns the event of `payload`, which ends at `cursor` of the log."""
        self._encoded = ResumePoint(cursor, self._ahead.left)
        return sse.event(payload, str(self._encoded))


def _text_payload(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"text": text, "token_ids": token_ids}


def _choice_payload(part: ChoiceDelta) -> dict[str, Any]:
    """Returns an event of a job with several choices; a choice's last has its finish reason."""
    payload = {"index": part.choice, **_text_payload(part.text, part.token_ids)}
    if part.finish_reason is not None:
        payload["finish_reason"] = part.finish_reason.value
        payload["stop_reason"] = part.stop_reason
    return payload


def _error_payload(error: ApiError) -> dict[str, Any]:
    return {**_text_payload("", ()), **error.body()}


class AheadTrimmer:
    """Skips the parts of a log that its reader has ahead of its cursor."""

    def __init__(self, ahead: Mapping[int, Extent]) -> None:
        self._left = dict(ahead)

    @property
    def left(self) -> Mapping[int, Extent]:
        """Returns a copy of the extents that are still to be skipped, by choice."""
        return dict(self._left)

    def rest_of(self, part: ChoiceDelta) -> ChoiceDelta | None:
        """Returns the piece of `part` that the reader lacks; None: nothing. The parts follow the
        cursor, in the log's order.

        Raises Diverged when the reader's text ends within a character.
        """
        had = self._left.get(part.choice)
        if had is None:
            return part
        text = part.text.encode()
        num_tokens = min(had.num_tokens, len(part.token_ids))
        num_bytes = min(had.num_bytes, len(text))
        is_end = part.finish_reason is not None
        left = Extent(
            had.num_tokens - num_tokens, had.num_bytes - num_bytes, had.has_end and not is_end
        )
        self._left[part.choice] = left
        if left == NOTHING:
            del self._left[part.choice]
        rest = part._replace(
            token_ids=part.token_ids[num_tokens:],
            text=_rest_of_text(text, num_bytes),
            logprobs=None if part.logprobs is None else part.logprobs[num_tokens:],
        )
        if had.has_end and is_end:
            rest = rest._replace(finish_reason=None, stop_reason=None)
        return rest if rest.token_ids or rest.text or rest.finish_reason is not None else None


def _rest_of_text(text: bytes, num_bytes: int) -> str:
    try:
        return text[num_bytes:].decode()
    except UnicodeDecodeError as error:
        raise Diverged(f"{num_bytes} bytes cut a character of the log in two") from error

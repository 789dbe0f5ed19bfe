"""Outbox: one job's output, from the end of its log when it was claimed, until it is durable."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import ceil
from operator import sub
from typing import Any

from shared.choice_deltas import chain_links, segment_deltas
from shared.messages import (
    PROMPT_SLICE_TOKENS,
    START,
    Cursor,
    Delta,
    Job,
    PromptLogprob,
    PromptSlice,
    Segment,
    TokenLogprob,
)
from shared.prompt_logprobs import encode_prompt_logprobs
from shared.tracing import attempt_fields
from shared.transport.ports.queue import Append, AppendStatus, Delivery, JobEnd, JobSnapshot
from shared.transport.wire import chain_hash

MAX_APPEND_TOKENS = 4096  # of one append: a long log is written again in parts
MAX_PIECES = 128  # kept apart in one append; beyond that, neighbouring pieces are joined


@dataclass(frozen=True, slots=True)
class Settled:
    """The publisher's last message about a job.

    OK: its end is durable. ENDED: it had ended before. FENCED: another attempt runs. GONE: it has
    ended, or was lost and cannot be restored. DIVERGED: this worker's copy is not the log's; the
    job must be taken up again. REJECTED: its end could not be written.
    """

    job_id: str
    attempt: int
    status: AppendStatus
    detail: str = ""


class Outbox:
    """Cuts a job's output into appends; every append is offered unchanged until it is settled.

    All output stays in memory while the job runs, so that a log which lost its tail, or everything,
    can be filled again.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        end: Cursor,
        links: Sequence[int],
        *,
        logged: Sequence[Delta] = (),
        has_choices: bool = False,
        snapshot: JobSnapshot | None = None,
        prompt: PromptLog | None = None,
        traceparent: str = "",
    ) -> None:
        """`end` is the log's end, `links` its chain (see chain_links).

        `logged`: the log itself; without it nothing before `end` can be written again. `snapshot`:
        the job as it was claimed, to restore it from. `prompt`: the log probabilities of its
        prompt; None if it requests none.
        """
        self._prompt = prompt or PromptLog(0)
        self.snapshot = snapshot
        self.sure_s = time.monotonic()  # when the server last knew this attempt
        self.waiting_since_s = 0.0  # since when the publisher has output of it to send
        self.job_id = job_id
        self.attempt = attempt
        self.traceparent = traceparent
        self.num_gaps = 0  # in a row
        self._base_hash = chain_hash("", links)
        self._base = end
        self._token_ids: list[int] = []  # of this attempt
        self._logprobs: list[TokenLogprob] = []
        self._texts: list[str] = []  # one per piece
        self._segments: list[Segment] = []  # one per piece of a job with several choices
        # Before the first piece and after each, cumulative: arrays, which the garbage collector
        # does not walk through.
        self._token_ends = array("q", (end.num_tokens,))
        self._byte_ends = array("q", (end.num_bytes,))
        self._num_accepted = 0  # pieces
        self._accepted_hash = self._base_hash
        self._in_flight: Append | None = None
        self._num_in_flight = 0  # pieces, counted from the first one
        self._end: JobEnd | None = None
        self._failed = False
        self.over = False
        self.cached_tokens: int | None = None  # prompt tokens of the prefix hit, once known
        self.num_lane_preemptions = 0  # if it was preempted since the last append
        if end != START and logged:
            self._take_log(logged, has_choices=has_choices)

    @classmethod
    def of(cls, delivery: Delivery) -> Outbox:
        """Returns the outbox of a claimed job, where its log ends."""
        is_new = delivery.end == START
        return cls(
            delivery.job.job_id,
            delivery.attempt,
            delivery.end,
            chain_links(delivery.output_token_ids, delivery.segments),
            logged=delivery.logged,
            has_choices=delivery.job.num_choices > 1,
            snapshot=delivery.snapshot,
            prompt=PromptLog.of_job(delivery.job)
            if is_new
            else PromptLog.of_log(delivery.prompt_slices),
            traceparent=delivery.job.traceparent,
        )

    @property
    def log_fields(self) -> dict[str, object]:
        """What its lines in the log have."""
        return attempt_fields(self.job_id, self.attempt, self.traceparent)

    def add(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        segment: Segment | None = None,
    ) -> None:
        """Adds output; ignored after `fail`.

        With several choices every piece comes with its one segment. A choice's end that
        has no token waits for some other token, or the job's end.
        """
        is_end = segment is not None and segment.finish_reason is not None
        if self._failed or not (token_ids or text or is_end):
            return
        assert self._end is None, "output after the end"
        self._token_ids.extend(token_ids)
        self._texts.append(text)
        self._token_ends.append(self._token_ends[-1] + len(token_ids))
        num_bytes = len(text) if text.isascii() else len(text.encode())
        self._byte_ends.append(self._byte_ends[-1] + num_bytes)
        if logprobs is not None:
            self._logprobs.extend(logprobs)
        if segment is not None:
            self._segments.append(segment)

    def add_of_prompt(self, entries: Sequence[PromptLogprob] | Sequence[bytes]) -> None:
        """Adds log probabilities or vectors of the prompt, all of them before the first piece."""
        self._prompt.add(entries)

    def finish(self, end: JobEnd) -> None:
        """Adds the end, which is sent with the last output. Ignored after `fail`."""
        if self._failed:
            return
        assert self._end is None, "a second end"
        self._end = end

    def fail(self, end: JobEnd) -> None:
        """Drops all output that is not durable; only the end is left to be sent."""
        self._failed = True
        self._in_flight = None
        self._truncate(self._num_accepted)
        self._end = end

    @property
    def cursor(self) -> Cursor:
        """After everything that was added."""
        return Cursor(self._token_ends[-1], self._byte_ends[-1])

    @property
    def accepted(self) -> Cursor:
        """After everything that is durable."""
        return self._cursor_at(self._num_accepted)

    @property
    def num_unsent(self) -> int:
        """Tokens that are not durable yet."""
        return self._token_ends[-1] - self._token_ends[self._num_accepted]

    @property
    def ending(self) -> bool:
        return self._end is not None

    @property
    def has_slice(self) -> bool:
        """True while the next append is a slice of the prompt."""
        prompt = self._prompt
        return bool(prompt.num_slices) and not self._failed and prompt.next_slice is not None

    @property
    def has_something(self) -> bool:
        """True when an append would carry something: prompt slices, new tokens, or the end."""
        return not self.over and (self.num_unsent > 0 or self._end is not None or self.has_slice)

    @property
    def is_first(self) -> bool:
        """True while the job's very first token waits."""
        return self._token_ends[self._num_accepted] == 0 and self._token_ends[-1] > 0

    def next_append(self) -> Append:
        """Returns all that is not durable; the same append while the last one is not settled.

        The slices of the prompt come first, one at a time.
        """
        if self._in_flight is None and self.has_slice:
            self._in_flight = Append(
                job_id=self.job_id,
                attempt=self.attempt,
                delta=Delta(START, START, (), ""),
                start_hash="",
                end_hash="",
                prompt_slice=self._prompt.next_slice,
            )
        if self._in_flight is None:
            begin = self._num_accepted
            end = self._end_of_append(begin)
            start, stop = self._cursor_at(begin), self._cursor_at(end)
            first = start.num_tokens - self._base.num_tokens
            last = stop.num_tokens - self._base.num_tokens
            token_ids = tuple(self._token_ids[first:last])
            logprobs = tuple(self._logprobs[first:last]) if self._logprobs else None
            segments = self._segments_between(begin, end)
            text = "".join(self._texts[begin:end])
            links = chain_links(token_ids, segments)
            self._in_flight = Append(
                job_id=self.job_id,
                attempt=self.attempt,
                delta=Delta(start, stop, token_ids, text, logprobs, segments),
                start_hash=self._accepted_hash,
                end_hash=chain_hash(self._accepted_hash, links),
                end_of_job=self._end if end == len(self._texts) else None,
                # The job keeps those of its first append.
                cached_tokens=self.cached_tokens if start == START else None,
                num_prompt_slices=0 if self._failed else self._prompt.num_slices,
                num_lane_preemptions=self.num_lane_preemptions,
            )
            self.num_lane_preemptions = 0
            self._num_in_flight = end
        return self._in_flight

    def accept(self) -> None:
        """Marks the append as durable; sets `over` when it carried the end."""
        assert self._in_flight is not None, "nothing was offered"
        if self._in_flight.prompt_slice is not None:
            self._prompt.accept()
            self._in_flight = None
            self.num_gaps = 0
            return
        self._num_accepted = self._num_in_flight
        self._accepted_hash = self._in_flight.end_hash
        self.over = self._in_flight.end_of_job is not None
        self._in_flight = None
        self.num_gaps = 0

    def rewind(self, log_end: Cursor) -> bool:
        """Sends the output after `log_end` again; returns False if no piece ends there."""
        self.num_gaps += 1
        index = self._index_of(log_end)
        if index is None:
            return False
        token_ids = self._token_ids[: log_end.num_tokens - self._base.num_tokens]
        links = chain_links(token_ids, self._segments[:index] if self._segments else None)
        self._in_flight = None
        if log_end == START:
            self._prompt.rewind()
        self._num_accepted = index
        self._accepted_hash = chain_hash(self._base_hash, links)
        return True

    def _take_log(self, logged: Sequence[Delta], *, has_choices: bool) -> None:
        """Adds what earlier attempts logged as pieces that are durable."""
        if (logged[0].start, logged[-1].end) != (START, self._base):
            return
        try:
            parts = [part for delta in logged for part in segment_deltas(delta)]
        except ValueError:  # of a log that cannot be divided nothing can be written again
            return
        accepted_hash, self._base, self._base_hash = self._base_hash, START, ""
        self._token_ends, self._byte_ends = array("q", (0,)), array("q", (0,))
        for part in parts:
            num_bytes = len(part.text.encode())
            segment = Segment(
                part.choice, len(part.token_ids), num_bytes, part.finish_reason, part.stop_reason
            )
            self.add(part.token_ids, part.text, part.logprobs, segment if has_choices else None)
        self._num_accepted = len(self._texts)
        self._accepted_hash = accepted_hash

    def _end_of_append(self, begin: int) -> int:
        """Returns the index of the piece at which an append that starts at `begin` ends."""
        ends = self._token_ends
        if ends[-1] - ends[begin] <= MAX_APPEND_TOKENS:
            return len(self._texts)
        return max(begin + 1, bisect_right(ends, ends[begin] + MAX_APPEND_TOKENS, lo=begin) - 1)

    def _cursor_at(self, index: int) -> Cursor:
        return Cursor(self._token_ends[index], self._byte_ends[index])

    def _index_of(self, cursor: Cursor) -> int | None:
        """Returns before which piece the log is at `cursor`; None: at none."""
        first = bisect_left(self._token_ends, cursor.num_tokens)
        for index in range(first, len(self._token_ends)):
            if self._token_ends[index] != cursor.num_tokens:
                return None
            if self._byte_ends[index] == cursor.num_bytes:
                return index
        return None

    def _segments_between(self, begin: int, end: int) -> tuple[Segment, ...] | None:
        """Returns the choice and length of each piece; None if neither is needed."""
        if self._segments:
            segments = tuple(self._segments[begin:end])
            return (segments if len(segments) <= MAX_PIECES else _joined(segments)) or None
        if end - begin <= 1:
            return None
        step = ceil((end - begin) / MAX_PIECES)
        tokens, num_bytes = (
            [*ends[begin:end:step], ends[end]] for ends in (self._token_ends, self._byte_ends)
        )
        lengths = map(sub, tokens[1:], tokens), map(sub, num_bytes[1:], num_bytes)
        return tuple(map(Segment, repeat(0), *lengths))

    def _truncate(self, num_pieces: int) -> None:
        num_tokens = self._token_ends[num_pieces] - self._base.num_tokens
        del self._texts[num_pieces:]
        del self._segments[num_pieces:]
        del self._token_ends[num_pieces + 1 :]
        del self._byte_ends[num_pieces + 1 :]
        del self._token_ids[num_tokens:]
        del self._logprobs[num_tokens:]


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Returns the segments with adjacent ones of a choice joined."""
    joined: list[Segment] = []
    for segment in segments:
        before = joined[-1] if joined else None
        if before is not None and before.choice == segment.choice:
            joined[-1] = segment._replace(
                num_tokens=before.num_tokens + segment.num_tokens,
                num_bytes=before.num_bytes + segment.num_bytes,
            )
        else:
            joined.append(segment)
    return tuple(joined)


class PromptLog:
    """Cuts what one job computes of its prompt into slices: log probabilities of
    PROMPT_SLICE_TOKENS each, or vectors.

    Their boundaries depend on the job alone: a slice of an earlier attempt covers the same part
    of the prompt and is kept. Encoded slices stay in memory while the job runs, so that a lost log
    can be written again.
    """

    def __init__(
        self,
        num_entries: int,
        per_slice: int = PROMPT_SLICE_TOKENS,
        encode: Callable[[Sequence[Any]], bytes] = encode_prompt_logprobs,
    ) -> None:
        """`num_entries`: how many will be added. `encode`: makes a slice of some of them."""
        self.num_slices = -(-num_entries // per_slice)
        self._per_slice, self._encode = per_slice, encode
        self._num_left = num_entries
        self._slices: list[PromptSlice] = []
        self._rest: list[Any] = []  # not a slice yet
        self._num_accepted = 0

    @classmethod
    def of_job(cls, job: Job) -> PromptLog:
        """Returns the prompt's part of the log of a job without output."""
        if job.pooling is not None:
            return cls(len(job.pooling.lengths), job.pooling.vectors_per_slice, b"".join)
        return cls(job.num_prompt_logprobs)

    @classmethod
    def of_log(cls, slices: Sequence[PromptSlice]) -> PromptLog:
        """Returns the prompt's part of a log with output: it has all slices, or none."""
        prompt = cls(0)
        prompt._slices = list(slices)
        prompt.num_slices = prompt._num_accepted = len(slices)
        return prompt

    def add(self, entries: Sequence[Any]) -> None:
        """Adds log probabilities of the prompt, or vectors of its inputs, in order."""
        assert len(entries) <= self._num_left, "more entries than the job has"
        self._num_left -= len(entries)
        self._rest += entries
        while len(self._rest) >= self._per_slice or (self._rest and not self._num_left):
            part = self._rest[: self._per_slice]
            del self._rest[: self._per_slice]
            self._slices.append(PromptSlice(len(self._slices), self._encode(part)))

    @property
    def next_slice(self) -> PromptSlice | None:
        """The first slice that is not durable, or None."""
        waits = self._num_accepted < len(self._slices)
        return self._slices[self._num_accepted] if waits else None

    def accept(self) -> None:
        """Marks the next slice as durable."""
        self._num_accepted += 1

    def rewind(self) -> None:
        """Starts over with an empty log: every slice is written again where it is missing."""
        self._num_accepted = 0

"""MergedStream: the jobs of a request with several prompts, read as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from api.jobs.event_stream import JobStream
from shared.messages import (
    Cursor,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Segment,
    Usage,
)
from shared.tasks import cancel_and_wait

LOOK_S = 60.0  # an empty look costs nothing

Event = Delta | Finished | Failed


class MergedStream:
    """Several jobs of one request, read as if they were one job with all their choices.

    Job number i's choice c is choice `i * num_choices + c` of the whole. Events of different jobs
    come in any order, each choice's own in theirs. It ends with one Finished when every job has
    finished, or with the first Failed. It owns the streams; not safe for several tasks.
    """

    def __init__(self, streams: Sequence[JobStream], num_choices: int) -> None:
        """Takes the streams of jobs with `num_choices` choices each."""
        self.job_id = streams[0].job_id
        self._streams = streams
        self._num_choices = num_choices
        self.recoveries = None  # a recovery is one job's
        self._ends: dict[int, Finished | Failed] = {}
        self._ready: deque[Event] = deque()
        # Bounded: a slow reader makes the streams wait, each of which bounds what it holds.
        self._arrived: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(len(streams))
        self._readers = [
            asyncio.create_task(self._read(index, stream)) for index, stream in enumerate(streams)
        ]

    @property
    def started_s(self) -> float | None:
        """Returns when a worker started the first of the jobs, if that was received."""
        known = [stream.started_s for stream in self._streams if stream.started_s is not None]
        return min(known, default=None)

    @property
    def num_waiting(self) -> int:
        """Returns how many events are here and were not read."""
        return len(self._ready) + self._arrived.qsize()

    def has_ended(self, index: int) -> bool:
        """Returns whether that job has ended for the reader."""
        return index in self._ends

    async def get(self, timeout_s: float) -> Event | None:
        """Returns the next event, or None if none comes within `timeout_s`.

        Raises StreamInterrupted, and other errors of the streams.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready:
                    index, arrived = await self._arrived.get()
                    if isinstance(arrived, Exception):
                        raise arrived
                    self._take(index, arrived)
        except TimeoutError:
            return None
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Closes all streams. Idempotent; cancels no job."""
        await cancel_and_wait(*self._readers)
        for stream in self._streams:
            await stream.aclose()

    async def _read(self, index: int, stream: JobStream) -> None:
        try:
            while not stream.ended:
                event = await stream.get(LOOK_S)
                if event is not None:
                    await self._arrived.put((index, event))
        except Exception as error:  # raised where the events are read
            await self._arrived.put((index, error))

    def _take(self, index: int, event: Event) -> None:
        first = index * self._num_choices
        if isinstance(event, Delta):
            self._ready.append(_renumbered(event, first))
            return
        self._ends[index] = event
        if isinstance(event, Failed):
            self._ready.append(event)
            return
        if self._num_choices == 1:  # its job's end is the choice's
            ending = (Segment(first, 0, 0, event.reason, event.stop_reason),)
            self._ready.append(Delta(event.end, event.end, (), "", None, ending))
        if len(self._ends) == len(self._streams):
            self._ready.append(_all_finished(list(self._ends.values())))


def _renumbered(delta: Delta, first: int) -> Delta:
    segments = delta.segments
    if segments is None:
        num_bytes = delta.end.num_bytes - delta.start.num_bytes
        segments = (Segment(0, len(delta.token_ids), num_bytes),)
    moved = tuple(segment._replace(choice=first + segment.choice) for segment in segments)
    return delta._replace(segments=moved)


def _all_finished(ends: Sequence[Finished | Failed]) -> Finished:
    """Returns one end of all jobs: LENGTH when any was cut, with the sums of the token counts."""
    reasons = {end.reason for end in ends if isinstance(end, Finished)}
    return Finished(
        end=Cursor(sum(end.end.num_tokens for end in ends), sum(end.end.num_bytes for end in ends)),
        reason=FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP,
        usage=Usage(
            sum(end.usage.prompt_tokens for end in ends),
            sum(end.usage.completion_tokens for end in ends),
            sum(end.usage.cached_tokens for end in ends),
        ),
    )

"""A store and a bus that misbehave on request: what a relay must put right."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from shared.messages import (
    START,
    Cursor,
    Delta,
    Failed,
    Finished,
    FinishReason,
    JobEvent,
    JobState,
    PromptSlice,
    Started,
    Usage,
)
from shared.transport.ports.jobs import RESYNC, JobLook, JobRecord, Resync, TransportError


class FakeSubscription:
    """Gives what was put in; RESYNC first, as after every confirmation."""

    def __init__(self) -> None:
        self.items: deque[JobEvent | Resync] = deque([RESYNC])
        self.closed = False

    @property
    def num_waiting(self) -> int:
        return len(self.items)

    async def get(self, timeout_s: float) -> JobEvent | Resync | None:
        if self.items:
            return self.items.popleft()
        await asyncio.sleep(min(timeout_s, 0.005))
        return self.items.popleft() if self.items else None

    def wake(self) -> None:
        """As Subscription: `get` looks again soon enough."""


class FakeBus:
    def __init__(self) -> None:
        self.subscription = FakeSubscription()
        self.steps: list[str] = []

    async def start(self) -> None: ...
    async def aclose(self) -> None: ...

    async def subscribe(self, job_id: str) -> FakeSubscription:
        self.steps.append("subscribe")
        return self.subscription

    async def begin(self, job_id: str) -> FakeSubscription:
        self.steps.append("begin")
        return self.subscription

    async def confirmed(self, subscription: FakeSubscription) -> None:
        self.steps.append("confirmed")

    async def unsubscribe(self, subscription: FakeSubscription) -> None:
        self.steps.append("unsubscribe")
        subscription.closed = True


class FakeStore:
    """A log that may be shown only up to `visible` entries, and that fails on request."""

    def __init__(self, log: Sequence[Delta | JobEvent] = ()) -> None:
        self.log = list(log)
        self.visible = len(self.log)
        self.failures = 0  # reads that fail before one works
        self.reads = 0
        self.looks = 0
        self.record: JobRecord | None = record_of(JobState.RUNNING)

    def partition_of(self, job_id: str) -> int:
        return 0

    async def read_log(
        self, job_id: str, after: Cursor, count: int = 256
    ) -> Sequence[Delta | JobEvent]:
        await asyncio.sleep(0)
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise TransportError("away")
        rest = [event for event in self.log[: self.visible] if _position(event) > after]
        return rest[:count]

    async def look(self, job_ids: Sequence[str]) -> Sequence[JobLook | None]:
        await asyncio.sleep(0)
        self.looks += 1
        if self.failures:
            self.failures -= 1
            raise TransportError("away")
        if self.record is None:
            return [None] * len(job_ids)
        shown = [
            event
            for event in self.log[: self.visible]
            if not isinstance(event, Started | PromptSlice)
        ]
        has_ended = bool(shown) and not isinstance(shown[-1], Delta)
        state = JobState.FINISHED if has_ended else self.record.state
        end = shown[-1].end if shown else START
        return [JobLook(state, end)] * len(job_ids)

    async def get(self, job_id: str) -> JobRecord | None:
        return self.record


def _position(event: Delta | JobEvent) -> Cursor:
    if isinstance(event, Delta):
        return event.end
    if isinstance(event, PromptSlice):
        return Cursor(0, event.index + 1)
    assert isinstance(event, Finished | Failed)
    return Cursor(event.end.num_tokens + 1, 0)


def log_of(texts: Sequence[str], *, start: Cursor = START, first_token: int = 0) -> list[Delta]:
    """One delta per text; a text has as many tokens as characters, and at least one."""
    deltas, cursor, token = [], start, first_token
    for text in texts:
        count = max(1, len(text))
        end = Cursor(cursor.num_tokens + count, cursor.num_bytes + len(text.encode()))
        deltas.append(Delta(cursor, end, tuple(range(token, token + count)), text))
        cursor, token = end, token + count
    return deltas


def finished_after(deltas: Sequence[Delta]) -> Finished:
    end = deltas[-1].end if deltas else Cursor(0, 0)
    return Finished(end, FinishReason.STOP, Usage(3, end.num_tokens))


def merged(deltas: Sequence[Delta]) -> Delta:
    """Neighbours as one delta, as a worker sends them again after a lost reply."""
    return Delta(
        deltas[0].start,
        deltas[-1].end,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
    )


def record_of(state: JobState, completion_tokens: int = 0, reason: str | None = None) -> JobRecord:
    return JobRecord(
        job_id="0-x",
        model="m",
        state=state,
        kind="chat",
        tenant="default",
        attempt=1,
        owner="w",
        reason=reason,
        message=None,
        stop_reason=None,
        client_request_id=None,
        prompt_tokens=3,
        completion_tokens=completion_tokens,
        cached_tokens=0,
        submitted_ms=1000,
        started_ms=None,
        first_token_ms=None,
        ended_ms=None,
        deadline_ms=9000,
    )

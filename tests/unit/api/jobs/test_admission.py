"""Admission and disconnects: a lost reply, a full queue, a reader that leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from api.errors import ApiError, UnavailableError
from api.jobs.accepted_jobs import AcceptedJobs
from api.jobs.admission import Admission, DurableAccept
from api.jobs.disconnects import DisconnectTracker
from shared.messages import (
    Durability,
    Job,
    OnDisconnect,
)
from shared.transport.ports.admission import AdmissionLimits, QueueFull, Submission
from shared.transport.ports.deployment import ProcessReport
from shared.transport.ports.jobs import Allowance, Submitted, TransportError
from shared.transport.ports.registry import QueueStats, WorkerStatus
from tests.support.transport_steps import make_job


class Store:
    """Records calls; fails the next `failures` of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures = 0
        self.refusal: QueueFull | None = None
        self.found: list[WorkerStatus] = []
        self.loading: list[ProcessReport] = []

    async def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal
        if self.failures:
            self.failures -= 1
            raise TransportError("away")

    async def submit(self, job: Job, limits: AdmissionLimits, reader_id: str) -> Submission:
        is_known = ("submit", job.job_id) in self.calls
        await self._called("submit", job.job_id)
        return Submission(Submitted.DUPLICATE if is_known else Submitted.ACCEPTED)

    async def cancel(self, job_id: str, reason: str) -> None:
        await self._called("cancel", job_id, reason)

    async def detach(self, job_id: str, reader_id: str) -> None:
        await self._called("detach", job_id, reader_id)

    async def attach(self, readers: Sequence[tuple[str, str]]) -> None:
        await self._called("attach", *readers)

    async def ping(self) -> float:
        await self._called("ping")
        return 0.001

    async def workers(self) -> list[WorkerStatus]:
        return self.found

    async def reports(self, kind: str, limit: int) -> list[ProcessReport]:
        return self.loading[:limit]

    async def queue_stats(self) -> QueueStats:
        return QueueStats(queued=3, running=2, queued_tokens=70, totals={"finished": 4})


def admission(store: Store) -> tuple[Admission, DisconnectTracker]:
    disconnects = DisconnectTracker(store)  # type: ignore[arg-type]
    limits = AdmissionLimits()
    accepted = AcceptedJobs(store)  # type: ignore[arg-type]
    durable = DurableAccept(store, Durability.NONE, 1, 5.0)  # type: ignore[arg-type]
    admission = Admission(store, lambda tenant: limits, disconnects.cancel, accepted.add, durable)  # type: ignore[arg-type]
    return admission, disconnects


async def test_a_submit_whose_answer_got_lost_is_repeated_under_the_same_id() -> None:
    store, one = Store(), make_job()
    store.failures = 1
    await admission(store)[0].submit(one)
    assert store.calls == [("submit", one.job_id)] * 2


async def test_a_job_that_is_there_already_gets_its_reader_at_once() -> None:
    store, one = Store(), make_job()
    room = admission(store)[0]
    await room.submit(one, "fe#1")
    await room.submit(one, "fe#2")
    assert store.calls[1:] == [("submit", one.job_id), ("attach", (one.job_id, "fe#2"))]


async def test_a_submit_that_may_have_arrived_is_cancelled_until_the_cancel_is_confirmed() -> None:
    store, one = Store(), make_job()
    store.failures = 3
    room, disconnects = admission(store)
    with pytest.raises(UnavailableError) as caught:
        await room.submit(one)
    assert caught.value.status == 503
    assert disconnects.num_pending == 1
    await disconnects.retry()
    assert disconnects.num_pending == 0
    assert store.calls[-1] == ("cancel", one.job_id, "disconnected")


@pytest.mark.parametrize(
    ("scope", "status"),
    [("total", 503), ("tokens", 503), ("memory", 503), ("queue_timeout", 503), ("tenant", 429)],
)
async def test_a_full_queue_is_reported_once_and_not_tried_again(scope: str, status: int) -> None:
    store = Store()
    store.refusal = QueueFull(scope, 2.3)
    with pytest.raises(ApiError) as caught:
        await admission(store)[0].submit(make_job())
    assert caught.value.status == status
    assert caught.value.headers["retry-after"] == "3"
    assert len(store.calls) == 1


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (OnDisconnect.CANCEL, [("cancel", "0-j", "disconnected")]),
        (OnDisconnect.GRACE, [("detach", "0-j", "fe#1")]),
        (OnDisconnect.CONTINUE, []),
    ],
)
async def test_a_disconnect_follows_the_requests_policy(
    policy: OnDisconnect, calls: list[Any]
) -> None:
    store = Store()
    await DisconnectTracker(store).left("0-j", "fe#1", policy)  # type: ignore[arg-type]
    assert store.calls == calls


async def test_readers_are_renewed_until_they_leave() -> None:
    store = Store()
    disconnects = DisconnectTracker(store)  # type: ignore[arg-type]
    disconnects.watch("0-j", "fe#1", OnDisconnect.CANCEL)
    disconnects.watch("0-j", "fe#2", OnDisconnect.GRACE)
    disconnects.watch("0-k", "fe#3", OnDisconnect.CONTINUE)  # lives without readers
    await disconnects.attach_all()
    disconnects.unwatch("fe#1")
    disconnects.unwatch("fe#2")
    await disconnects.attach_all()
    assert store.calls == [("attach", ("0-j", "fe#1"), ("0-j", "fe#2"))]


async def test_a_refusal_that_holds_for_every_job_is_known_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    room = admission(store)[0]
    assert room.refusal_of("default") is None
    now_s = 100.0
    monkeypatch.setattr("api.jobs.admission.time.monotonic", lambda: now_s)

    async def refused(*of: Any) -> None:
        store.refusal = QueueFull(*of)
        with pytest.raises(UnavailableError):
            await room.submit(make_job())

    await refused("tenant_tokens", 3.0)
    assert room.refusal_of("default") is None, "a shorter prompt may be accepted"
    await refused("tenant", 3.0)
    known = room.refusal_of("default")
    assert known is not None
    assert (known.status, known.code) == (429, "tenant_queue_full")
    assert room.refusal_of("other") is None
    now_s += 1.0
    assert room.refusal_of("default") is None, "the queue is asked again"
    # Of 60 a minute none is left: there is one in a second.
    await refused("requests_per_minute", 1.0, (Allowance("requests", 60, 0, 60_000),))
    now_s += 0.9
    assert room.refusal_of("default") is not None
    now_s += 0.2
    assert room.refusal_of("default") is None

"""The small rooms: what each promises when the world misbehaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from api.errors import ApiError, UnavailableError, job_failed, queue_full
from api.generation import thread_pool as text_pool
from api.generation.thread_pool import MIN_BYTES, SMALL_BYTES, TextPool, request_bytes
from api.http.open_requests import Ending, OpenRequests
from api.ids import parse_job_id, public_id
from api.jobs.accepted_jobs import AcceptedJobs
from api.jobs.admission import Admission, DurableAccept
from api.jobs.disconnects import DisconnectTracker
from api.jobs.protocol import job_payload, parse_status
from api.settings import ApiSettings
from api.system.health_monitor import HealthMonitor
from shared.keys import new_job_id
from shared.messages import (
    START,
    Durability,
    ErrorCode,
    Failed,
    InvalidParameter,
    Job,
    JobState,
    OnDisconnect,
    SamplingParams,
    Usage,
)
from shared.settings import SettingsError, load_settings
from shared.tasks import cancel_and_wait
from shared.transport.ports.jobs import (
    AdmissionLimits,
    QueueFull,
    Submission,
    Submitted,
    TransportError,
)
from shared.transport.ports.registry import QueueStats, WorkerStatus
from tests.unit.api.jobs.relay_fakes import record_of


class Store:
    """Records calls; fails the next `failures` of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures = 0
        self.refusal: QueueFull | None = None
        self.found: list[WorkerStatus] = []

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

    async def queue_stats(self) -> QueueStats:
        return QueueStats(queued=3, running=2, queued_tokens=70, totals={"finished": 4})


def job() -> Job:
    return Job(
        job_id=new_job_id(),
        model="m",
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        kind="chat",
    )


def admission(store: Store) -> tuple[Admission, DisconnectTracker]:
    disconnects = DisconnectTracker(store)  # type: ignore[arg-type]
    limits = AdmissionLimits()
    accepted = AcceptedJobs(store)  # type: ignore[arg-type]
    durable = DurableAccept(store, Durability.NONE, 1, 5.0)  # type: ignore[arg-type]
    admission = Admission(store, lambda tenant: limits, disconnects, accepted, durable)  # type: ignore[arg-type]
    return admission, disconnects


async def test_a_submit_whose_answer_got_lost_is_repeated_under_the_same_id() -> None:
    store, one = Store(), job()
    store.failures = 1
    await admission(store)[0].submit(one)
    assert store.calls == [("submit", one.job_id)] * 2


async def test_a_job_that_is_there_already_gets_its_reader_at_once() -> None:
    store, one = Store(), job()
    room = admission(store)[0]
    await room.submit(one, "fe#1")
    await room.submit(one, "fe#2")
    assert store.calls[1:] == [("submit", one.job_id), ("attach", (one.job_id, "fe#2"))]


async def test_a_submit_that_may_have_been_heard_is_cancelled_until_that_is_heard() -> None:
    store, one = Store(), job()
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
async def test_a_full_queue_is_said_once_and_not_tried_again(scope: str, status: int) -> None:
    store = Store()
    store.refusal = QueueFull(scope, 2.3)
    with pytest.raises(ApiError) as caught:
        await admission(store)[0].submit(job())
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
async def test_leaving_does_what_the_request_asked_for(
    policy: OnDisconnect, calls: list[Any]
) -> None:
    store = Store()
    await DisconnectTracker(store).left("0-j", "fe#1", policy)  # type: ignore[arg-type]
    assert store.calls == calls


async def test_readers_say_that_they_are_there_until_they_leave() -> None:
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


async def test_work_ends_when_the_client_leaves_is_cut_or_is_done() -> None:
    requests = OpenRequests(limit=2)

    async def never() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with requests.enter() as request:
        assert await request.run(gone, asyncio.Event().wait) is Ending.LEFT  # type: ignore[arg-type]
    with requests.enter() as request:
        assert await request.run(never, lambda: asyncio.sleep(0)) is Ending.DONE  # type: ignore[arg-type]
    with requests.enter() as request:
        asyncio.get_running_loop().call_soon(requests.cut_all)
        assert await request.run(never, asyncio.Event().wait) is Ending.CUT  # type: ignore[arg-type]

    async def broken() -> None:
        raise ZeroDivisionError

    with requests.enter() as request, pytest.raises(ZeroDivisionError):
        await request.run(never, broken)  # type: ignore[arg-type]
    assert len(requests) == 0


def test_open_requests_are_bounded_and_can_be_closed() -> None:
    requests = OpenRequests(limit=1)
    with requests.enter(), pytest.raises(UnavailableError) as full, requests.enter():
        pass
    assert full.value.code == "server_overloaded"
    requests.close("going down")
    with pytest.raises(UnavailableError, match="going down"), requests.enter():
        pass


async def test_the_text_pool_refuses_what_it_cannot_hold() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=2 * MIN_BYTES), threading.Event()
    waiting = [asyncio.create_task(pool.run(release.wait, 20)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await pool.run(len, "abc")
    waiting[1].cancel()  # its caller leaves: the place stays taken until the thread had it
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await pool.run(len, "abc")
    release.set()
    assert await waiting[0]
    with anyio.fail_after(10):
        while pool._num_taken:
            await asyncio.sleep(0.001)
    assert await pool.run(len, "abc") == 3
    pool.close()


async def test_what_waits_for_a_text_thread_is_bounded_in_bytes_and_one_may_always_wait() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=10 * MIN_BYTES), threading.Event()
    waiting = [asyncio.create_task(pool.run(release.wait, 20))]
    await asyncio.sleep(0)

    async def large() -> int:
        request_bytes.set(20 * MIN_BYTES)
        return await pool.run(len, "large")

    waiting += [asyncio.create_task(large()) for _ in range(2)]  # type: ignore[misc]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError) as full:
        await asyncio.create_task(large())
    assert full.value.code == "server_overloaded"
    small = asyncio.create_task(pool.run(len, "abc"))  # large ones do not take its place
    release.set()
    assert await asyncio.gather(*waiting, small) == [True, 5, 5, 3]
    pool.close()


async def test_small_text_does_not_wait_for_large_text() -> None:
    pool, release = TextPool(threads=2, max_waiting_bytes=2**20), threading.Event()

    async def large() -> bool:
        request_bytes.set(SMALL_BYTES + 1)
        return await pool.run(release.wait, 20)

    waiting = [asyncio.create_task(large()) for _ in range(4)]
    await asyncio.sleep(0)
    with anyio.fail_after(10):
        assert [await pool.run(len, "abc") for _ in range(20)] == [3] * 20
    assert not any(task.done() for task in waiting)
    release.set()
    assert all(await asyncio.gather(*waiting))
    pool.close()


async def test_small_text_does_not_starve_large_text() -> None:
    pool, is_over = TextPool(threads=2, max_waiting_bytes=2**20), threading.Event()

    async def flood() -> None:
        while not is_over.is_set():
            await pool.run(time.sleep, 0.001)

    floods = [asyncio.create_task(flood()) for _ in range(8)]
    await asyncio.sleep(0.01)
    request_bytes.set(SMALL_BYTES + 1)
    with anyio.fail_after(10):
        assert [await pool.run(len, "abc") for _ in range(20)] == [3] * 20
    is_over.set()
    await asyncio.gather(*floods)
    pool.close()


async def test_a_closed_text_pool_cancels_what_waits() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=2**20), threading.Event()
    at_work, waits = (asyncio.create_task(pool.run(release.wait, 20)) for _ in range(2))
    await asyncio.sleep(0.05)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert pool.num_busy == 1
    release.set()
    assert await at_work


async def test_what_waits_too_long_for_a_text_thread_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_pool, "MAX_WAIT_S", 0.05)
    pool, release = TextPool(threads=1, max_waiting_bytes=10 * MIN_BYTES), threading.Event()
    at_work = asyncio.create_task(pool.run(release.wait, 20))
    await asyncio.sleep(0)
    begun: list[int] = []
    with pytest.raises(UnavailableError):
        await pool.run(begun.append, 1)
    with anyio.fail_after(10):
        while len(pool) > 1:  # what was given up leaves its place
            await asyncio.sleep(0.001)
    release.set()
    assert await at_work, "what a thread is at is not given up"
    assert await pool.run(len, "abc") == 3
    assert not begun
    pool.close()


async def test_a_task_that_forgets_a_cancel_is_cancelled_again() -> None:
    forgotten = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                forgotten.append(1)
                if len(forgotten) == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    with anyio.fail_after(10):
        await cancel_and_wait(task)
    assert len(forgotten) == 3


def worker(**more: Any) -> WorkerStatus:
    stats = {"step": 5.0, "waiting": 1.0, "prefilling": 1.0, "active": 2.0, "pending": 1.0}
    members = {"beat_age_s": 0.1, "draining": False, "stalled": False, **more}
    return WorkerStatus("w", ("m",), stats={**stats, "tok_s": 1.5}, **members)  # type: ignore[arg-type]


async def test_health_says_the_worst_that_it_knows() -> None:
    store = Store()
    health = HealthMonitor(store, store)  # type: ignore[arg-type]
    assert health.status == "degraded"
    await health.refresh()
    assert (health.status, health.is_fresh) == ("no_workers", True)
    store.found = [worker(), worker(draining=True)]
    await health.refresh()
    assert (health.status, health.is_fresh) == ("ok", True)
    payload = health.payload()
    assert (payload["running"], payload["waiting"]) == (6, 3 + 4)
    assert payload["workers"][0]["tok_s"] == 1.5
    assert [one["status"] for one in payload["workers"]] == ["ok", "draining"]
    store.found = [worker(stalled=True)]
    await health.refresh()
    assert (health.status, health.is_fresh) == ("stalled", True)
    store.failures = 1
    with pytest.raises(TransportError):
        await health.refresh()
    assert (health.status, health.is_fresh) == ("degraded", False)


@pytest.mark.parametrize(
    ("code", "state", "status", "kind"),
    [
        (ErrorCode.WORKER_LOST, JobState.FAILED, 502, "server_error"),
        (ErrorCode.DEADLINE_EXCEEDED, JobState.EXPIRED, 504, "timeout"),
        (ErrorCode.QUEUE_TIMEOUT, JobState.EXPIRED, 504, "timeout"),
        (ErrorCode.KV_CAPACITY_EXCEEDED, JobState.FAILED, 400, "invalid_request_error"),
        (ErrorCode.JOB_LOST, JobState.FAILED, 503, "service_unavailable"),
        (ErrorCode.CANCELLED, JobState.CANCELLED, 409, "cancelled"),
        ("some_new_reason", JobState.CANCELLED, 409, "cancelled"),
        ("some_new_code", JobState.FAILED, 500, "server_error"),
    ],
)
def test_every_end_of_a_job_has_a_status(
    code: str, state: JobState, status: int, kind: str
) -> None:
    error = job_failed(Failed(START, state, code, "why", Usage(3, 1)), delivered=False)
    assert (error.status, error.kind, error.code) == (status, kind, code)
    again = job_failed(Failed(START, state, code, "", Usage(3, 1)), delivered=True)
    assert again.headers["x-should-retry"] == "false"
    assert again.message


def test_every_error_code_has_a_status() -> None:
    for code in ErrorCode:
        failed = Failed(START, JobState.FAILED, code, "", Usage(1, 1))
        assert 400 <= job_failed(failed, delivered=False).status < 600


def test_retry_after_is_a_whole_number_of_seconds() -> None:
    assert queue_full(QueueFull("total", 0.01)).headers["retry-after"] == "1"
    assert "within its queue timeout" in queue_full(QueueFull("queue_timeout", 1.0)).message


def test_public_ids_lead_back_to_the_job() -> None:
    job_id = new_job_id()
    for kind in ("chat", "completion", "generate", "unheard-of"):
        assert parse_job_id(public_id(kind, job_id)) == job_id
    for text in ("", "x", "chatcmpl-", "0-", "0-a b", "-1-x", "0-" + "a" * 100, "0-é"):
        assert parse_job_id(text) is None


def test_status_words_are_those_of_http() -> None:
    words = {state: job_payload(record_of(state))["status"] for state in JobState}
    assert set(words.values()) == {
        "queued", "running", "finished", "failed", "cancelled", "expired",
    }  # fmt: skip
    assert all(parse_status(word) is state for state, word in words.items())
    with pytest.raises(InvalidParameter):
        parse_status("done")


def test_settings_have_bounds_and_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://localhost")
    monkeypatch.setenv("CORS_ORIGINS", "https://a.example/, https://b.example")
    origins = load_settings(ApiSettings).origins_for(has_keys=False)
    assert [origins.allows(f"https://{name}.example") for name in "abc"] == [True, True, False]
    assert load_settings(ApiSettings).queue_timeout_s == 0  # none
    monkeypatch.setenv("QUEUE_TIMEOUT_S", "1.5")
    assert load_settings(ApiSettings).queue_timeout_s == 1.5
    for name, value in (("QUEUE_TIMEOUT_S", "-1"), ("KEEPALIVE_S", "16")):
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=name):
            load_settings(ApiSettings)
        monkeypatch.delenv(name)

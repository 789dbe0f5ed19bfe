"""Which model a worker with a list serves next."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.transport.ports.jobs import TransportError
from shared.transport.ports.offers import WaitingModel
from tests.support.polling import until
from tests.unit.worker.fakes import FakeQueue
from worker import model_swaps
from worker.checkpoint import LoadedModel, find_checkpoint
from worker.model_swaps import SwappingWorker, next_model
from worker.runtime.interpreter import EngineNotLoaded
from worker.runtime.link import EngineLink
from worker.settings import DEMO_MODEL_NAME, WorkerSettings, listed_models

BOUND_MS = 30_000
SWAP_MS = 2_000


def of(model: str, oldest_ms: int, num_waiting: int = 1, **more: object) -> WaitingModel:
    return WaitingModel(model, num_waiting, oldest_ms, **more)  # type: ignore[arg-type]


def following(
    *queues: WaitingModel, is_idle: bool = False, not_now: tuple[str, ...] = ()
) -> str | None:
    found = next_model(
        "own",
        queues,
        is_idle=is_idle,
        bound_ms=BOUND_MS,
        swap_ms=SWAP_MS,
        not_now=not_now,
    )
    return None if found is None else found.model


def test_a_busy_worker_stays_until_another_model_has_waited_for_the_bound() -> None:
    assert following(of("own", 90_000), of("a", BOUND_MS - 1)) is None
    assert following(of("own", 90_000), of("a", BOUND_MS)) == "a"


def test_a_worker_without_queued_jobs_stays_while_its_own_run() -> None:
    assert following(of("own", 0, 0), of("a", BOUND_MS - 1)) is None


def test_an_idle_worker_leaves_at_once_for_a_model_that_waits() -> None:
    assert following(of("own", 0, 0), of("a", 1), is_idle=True) == "a"
    assert following(of("own", 10), of("a", 1), is_idle=True) is None, "its own jobs wait"


def test_nothing_waits_and_nothing_changes() -> None:
    assert following(of("own", 0, 0), of("a", 0, 0), is_idle=True) is None
    assert following(is_idle=True) is None


def test_the_longest_wait_goes_first_and_the_order_of_the_list_decides_a_tie() -> None:
    assert following(of("a", 31_000), of("own", 0), of("b", 32_000)) == "b"
    assert following(of("a", 31_000), of("b", 31_000)) == "a"


def test_with_several_that_wait_the_first_goes_a_swap_earlier_for_each_further_one() -> None:
    early_ms = BOUND_MS - 2 * SWAP_MS
    queues = [of("a", early_ms), of("b", early_ms - 1), of("c", early_ms - 2)]
    assert following(*queues) == "a"
    assert following(*queues[:2]) is None, "fewer swaps are ahead"
    # "a" is served now: "b" is the last, and not yet due.
    assert following(of("b", BOUND_MS - 1)) is None


def test_of_three_models_that_always_have_jobs_none_waits_longer_than_the_bound_and_a_swap() -> (
    None
):
    look_ms = round(1000 * model_swaps.LOOK_S)
    arrived_ms = dict.fromkeys(("own", "a", "b"), 0)  # of the oldest job that waits
    serving, longest_ms, num_swaps, now_ms = "own", 0, 0, 0
    while now_ms < 20 * BOUND_MS:
        now_ms += look_ms
        longest_ms = max(longest_ms, now_ms - arrived_ms[serving])
        arrived_ms[serving] = now_ms
        queues = [of(name, now_ms - at_ms) for name, at_ms in arrived_ms.items()]
        found = next_model(serving, queues, is_idle=False, bound_ms=BOUND_MS, swap_ms=SWAP_MS)
        if found is not None:
            serving, num_swaps, now_ms = found.model, num_swaps + 1, now_ms + SWAP_MS
    assert longest_ms <= BOUND_MS + SWAP_MS + 2 * look_ms
    assert longest_ms > BOUND_MS / 2
    assert num_swaps <= 20 * 4, "each is served for a good part of the bound"


def test_a_model_is_served_for_a_while_however_many_others_wait() -> None:
    early = [of(name, BOUND_MS // 2 - 1) for name in map(str, range(20))]
    assert following(of("own", 0), *early) is None
    assert following(of("own", 0), *early, of("a", BOUND_MS // 2)) == "a"


def test_a_model_that_waits_becomes_due_however_busy_the_own_one_is() -> None:
    waits_ms = range(0, 2 * BOUND_MS, 500)
    left = [ms for ms in waits_ms if following(of("own", ms, 1000), of("a", ms)) == "a"]
    assert left[0] == BOUND_MS


def test_a_model_that_another_worker_has_claimed_is_left_to_it() -> None:
    assert following(of("a", 90_000, is_claimed=True), of("b", 40_000)) == "b"


def test_an_idle_worker_takes_a_model_from_one_that_drains_for_it() -> None:
    drained_for = of("a", 90_000, is_drained_for=True)
    assert following(of("own", 0, 0), drained_for, is_idle=True) == "a"
    assert following(of("own", 0, 0), drained_for) is None, "one busy worker is enough"


def test_a_served_model_is_helped_by_an_idle_worker_alone() -> None:
    served = of("a", BOUND_MS, num_workers=1)
    assert following(of("own", 0, 0), served) is None
    assert following(of("own", 0, 0), served, is_idle=True) == "a"
    short = of("a", BOUND_MS - 1, num_workers=1)
    assert following(of("own", 0, 0), short, is_idle=True) is None


def test_a_model_that_failed_to_load_is_left_out_for_now() -> None:
    assert following(of("a", 90_000), of("b", 40_000), not_now=("a",)) == "b"


def test_models_are_listed_by_name_or_by_themselves() -> None:
    found = listed_models("small=/models/a, org/model@main, ./x=y/z")
    assert found == {"small": "/models/a", "org/model": "org/model@main", "z": "./x=y/z"}


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ("a=/x,a=/y", "'a' names two models"),
        ("a=", "'a=' is neither a model nor a name"),
        ("a b=/x", "'a b=/x' is neither"),
        (",".join(f"m{n}=/x" for n in range(65)), "65 models are more than 64"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_with_a_sentence(models: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WorkerSettings(redis_url="unix:///unused", models=models)


def test_a_list_and_a_directory_for_kv_blocks_exclude_each_other() -> None:
    """The models would delete each other's."""
    with pytest.raises(ValueError, match="PENSTOCK_KV_OFFLOADING_DIR is not for PENSTOCK_MODELS"):
        WorkerSettings(
            redis_url="unix:///unused", models="a=/x", kv_offloading_gb=1, kv_offloading_dir="/kv"
        )
    WorkerSettings(redis_url="unix:///unused", models="a=/x", kv_offloading_gb=1)


def test_a_list_and_a_single_model_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="PENSTOCK_MODELS and PENSTOCK_MODEL"):
        WorkerSettings(redis_url="unix:///unused", models="a=/x", model="/y")
    with pytest.raises(ValueError, match="PENSTOCK_ENGINE=http"):
        WorkerSettings(
            redis_url="unix:///unused",
            models="a=/x",
            engine="http",
            upstream_urls="http://127.0.0.1:1",
        )


def test_without_a_list_there_is_one_model() -> None:
    assert WorkerSettings(redis_url="unix:///unused").named_models == {DEMO_MODEL_NAME: ""}


class Alone:
    """A transport of one worker, whose jobs never come."""

    def __init__(self) -> None:
        self.queue = FakeQueue()
        self.offers = self.deployment = self
        self.num_checks = 0
        self.offered: dict[str, Any] = {}
        self.fault: Exception | None = None

    def new_queue(self) -> FakeQueue:
        return self.queue

    async def check(self) -> Sequence[str]:
        self.num_checks += 1
        return []

    async def report(self, *arguments: Any) -> None:
        """Reports that a model is being loaded; nobody looks."""

    async def offer(self, *arguments: Any, **more: Any) -> Sequence[WaitingModel]:
        if self.fault is not None:
            raise self.fault
        self.offered = more
        return []

    async def claim(self, *arguments: Any, **more: Any) -> bool:
        if self.fault is not None:
            raise self.fault
        return True


def swapping(transport: Any, names: str = "ab") -> SwappingWorker:
    settings = WorkerSettings(redis_url="unix:///unused", runner="echo", engine_restarts=0)
    return SwappingWorker(settings, [find_checkpoint("", name) for name in names], transport, "w")


async def test_the_server_is_checked_once_for_all_models() -> None:
    transport = Alone()
    worker = swapping(transport)
    for _ in range(2):
        await worker._check()
    assert transport.num_checks == 1


def model_b() -> LoadedModel:
    """Returns it as far as a swap reads it."""
    return cast(LoadedModel, SimpleNamespace(name="b", card=None, blobs={}))


async def test_the_next_estimate_has_the_time_of_the_last_load() -> None:
    transport = Alone()
    worker = swapping(transport)
    await worker._offer()
    assert transport.offered["swap_ms"] == 1000 * model_swaps.UNKNOWN_SWAP_S
    worker._claimed, worker._left_s = of("b", 1), time.monotonic() - 60
    worker.loaded(model_b())
    await worker._offer()
    assert transport.offered["swap_ms"] == round(1000 * worker.counts.seconds) >= 60_000


async def test_a_model_that_cannot_be_loaded_is_reported_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Alone()
    worker = swapping(transport)
    assert worker._after_failure("b", "a", EngineNotLoaded("no weights", by_settings=True)) == "a"
    await worker._offer()
    assert transport.offered["failed"] == ("b",)
    assert worker.counts.load_error == "b: no weights"
    assert "Correct its files or the worker's settings" in caplog.text
    worker.loaded(model_b())
    await worker._offer()
    assert transport.offered["failed"] == ()
    assert (worker.counts.load_error, worker.counts.num_failures) == ("", 1)


async def test_a_claim_that_an_idle_worker_took_is_not_confirmed() -> None:
    worker = swapping(Alone())
    worker._claimed = of("b", 1)
    worker.is_lost.set()
    assert not await worker.confirm()
    assert worker._claimed is None


async def test_a_claim_that_the_store_does_not_confirm_is_given_up() -> None:
    transport = Alone()
    worker = swapping(transport)
    worker._claimed = of("b", 1)
    transport.fault = TransportError("away")
    assert not await worker.confirm()
    assert worker._claimed is None


async def test_a_worker_without_room_for_an_engine_process_waits_and_tries_its_models_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried_s: list[float] = []
    start = EngineLink.start

    async def fails_twice(first: Any) -> EngineLink:
        tried_s.append(asyncio.get_running_loop().time())
        if len(tried_s) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await start(first)

    monkeypatch.setattr(EngineLink, "start", fails_twice)
    monkeypatch.setattr(model_swaps, "LOAD_RETRY_S", 1.0)
    transport = Alone()
    worker = swapping(transport)
    running = asyncio.create_task(worker.run())
    await until(lambda: "setup" in transport.queue.calls)
    first, second, third = tried_s
    assert second - first < 0.9 < third - first
    worker.stop()
    assert await running == 0


async def test_a_stop_ends_the_wait_for_a_model_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(first: Any) -> EngineLink:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(EngineLink, "start", fails)
    worker = swapping(Alone())
    running = asyncio.create_task(worker.run())
    await until(lambda: "no model can be loaded now" in caplog.text)
    worker.stop()
    assert await running == 70


async def test_an_unexpected_error_of_the_offers_ends_the_worker() -> None:
    transport = Alone()
    worker = swapping(transport)
    running = asyncio.create_task(worker.run())
    await until(lambda: "setup" in transport.queue.calls)
    transport.fault = ValueError("a defect")
    with pytest.raises(ValueError, match="a defect"):
        await asyncio.wait_for(running, 20)
    assert transport.queue.retired


async def test_a_prepared_engine_that_dies_is_started_again_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_stopped = 0

    class Dead:
        is_alive = False

        async def stop(self) -> None:
            nonlocal num_stopped
            num_stopped += 1

    async def start(first: Any) -> Any:
        return Dead()

    monkeypatch.setattr(EngineLink, "start", start)
    monkeypatch.setattr(model_swaps, "LOOK_S", 0.01)
    worker = swapping(Alone())
    worker._loading = ""
    preparing = asyncio.create_task(worker._prepare_often())
    await until(lambda: num_stopped == 3, timeout_s=20)
    assert worker.take_prepared() is None
    preparing.cancel()
    pauses_s = [record.retry_s for record in caplog.records]  # type: ignore[attr-defined]
    assert pauses_s[:2] == [0.01, 0.02]

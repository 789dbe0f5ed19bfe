"""SwappingWorker: a worker with a list of models serves one at a time, and loads another when jobs
wait for it.

Each model gets a WorkerService of its own, with a new engine process. In between the worker drains:
no running job is cut off. Which model is next is decided in `next_model`; Redis gives each model to
one worker alone (lua/swap.lua).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from shared.backoff import Backoff
from shared.outages import STORE, RateLimitedOutageLog
from shared.tasks import cancel_and_wait, first_of
from shared.text.base import TextInvalid
from shared.transport.ports.deployment import Deployment
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.offers import ModelOffers, WaitingModel
from shared.transport.ports.queue import JobQueue
from shared.transport.ports.registry import Order
from worker.checkpoint import Announcement, Checkpoint, LoadedModel
from worker.heartbeat import SwapCounts, WorkerProbes
from worker.metrics import WorkerMetrics
from worker.running_jobs import RunningJobs
from worker.runtime.link import EngineLink
from worker.runtime.messages import Prepare
from worker.service import ANNOUNCE_INTERVAL_S, NotLoaded, WorkerService, refuse
from worker.settings import WorkerSettings
from worker.standing_order import StandingOrder

LOOK_S = 0.5  # between looks at the queues of all models
UNKNOWN_SWAP_S = 5.0  # before the first one was measured
MAX_LOAD_FAILURES = 3  # of one model, after which this worker offers it no more
MAX_PREPARE_S = 60.0  # between tries to prepare an engine process
LOAD_RETRY_S = 30.0  # after the first failure of a model; doubled with each

log = logging.getLogger(__name__)


def next_model(
    current: str,
    queues: Sequence[WaitingModel],
    *,
    is_idle: bool,
    bound_ms: int,
    swap_ms: int,
    not_now: Collection[str] = (),
) -> WaitingModel | None:
    """Returns the model to serve instead of `current`: the one whose oldest job has waited longest;
    None: none is due.

    A worker that runs jobs, or has some queued, leaves its model when another one's jobs have
    waited for `bound_ms`, less a swap for each further model that waits, but at least for half of
    it: the last of them is then served within the bound and one swap, where they are few. An idle
    worker leaves at once, and helps with a model that others serve once that one's jobs have waited
    for the bound. It also takes a model from a worker that still drains for it. `not_now`: models
    that failed to load.
    """
    own_waiting = sum(queue.num_waiting for queue in queues if queue.model == current)
    may_help = is_idle and not own_waiting
    waiting = [
        queue
        for queue in queues
        if queue.num_waiting
        and queue.model != current
        and queue.model not in not_now
        and not queue.is_claimed
        and (may_help or not queue.is_drained_for)
    ]
    unserved = [queue for queue in waiting if not queue.num_workers]
    due_ms = 0 if may_help else max(bound_ms // 2, bound_ms - swap_ms * (len(unserved) - 1))
    due = [queue for queue in unserved if queue.oldest_ms >= due_ms]
    if may_help:
        due += [queue for queue in waiting if queue.num_workers and queue.oldest_ms >= bound_ms]
    return max(due, key=lambda queue: queue.oldest_ms, default=None)


class WorkerTransport(Protocol):
    """The part of a transport that a worker uses."""

    @property
    def queue(self) -> JobQueue: ...
    @property
    def offers(self) -> ModelOffers: ...
    @property
    def deployment(self) -> Deployment: ...
    def new_queue(self) -> JobQueue: ...
    async def check(self) -> Sequence[str]: ...


class SwappingWorker:
    """Serves the models of `checkpoints`, the first one first. `run` once; `stop` from a signal
    handler."""

    def __init__(
        self,
        settings: WorkerSettings,
        checkpoints: Sequence[Checkpoint],
        transport: WorkerTransport,
        worker_id: str,
    ) -> None:
        self._settings = settings
        self._checkpoints = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        self._transport = transport
        self.worker_id = worker_id
        self.counts = SwapCounts()
        self.order = Order.SERVE
        self._announced: dict[str, Announcement] = {}
        self._queues: Sequence[WaitingModel] = ()
        self._failures: dict[str, tuple[int, float]] = {}  # how many, and when to try again
        self._claimed: WaitingModel | None = None  # drained for, or loaded instead of another
        self.is_lost = asyncio.Event()  # this claim: an idle worker loads the model
        self._claiming = asyncio.Lock()  # no offer without the claim is sent during it
        self._loading = ""  # the model of `_service` until it is served
        self._is_idle = False
        self._claimed_s = self._left_s = 0.0  # when it was claimed, and the last job had ended
        self._swap_s = UNKNOWN_SWAP_S  # of a load: how long a drain takes depends on the jobs
        self._prepared: EngineLink | None = None
        self._preparing = Backoff(LOOK_S, MAX_PREPARE_S)
        self._stopped = asyncio.Event()
        self._is_checked = False  # Redis
        self._service = self._service_of(checkpoints[0].name)

    @property
    def metrics(self) -> WorkerMetrics:
        return self._service.metrics

    @property
    def probes(self) -> WorkerProbes:
        return self._service.probes

    def stop(self) -> None:
        """Stops as WorkerService does."""
        self._stopped.set()
        self._service.stop()

    async def run(self) -> int:
        """Returns the exit status, as WorkerService's, after the last model."""
        try:
            await asyncio.to_thread(self._read_cards)
        except (TextInvalid, OSError) as error:
            return refuse(error)
        serving = asyncio.create_task(self._serve_each(), name="models")
        others = [
            asyncio.create_task(self._offer_often(), name="offers"),
            asyncio.create_task(self._announce_often(), name="announcer of the list"),
        ]
        if self._settings.engine == "penstock" and self._settings.runner == "model":
            others.append(asyncio.create_task(self._prepare_often(), name="prepared engine"))
        try:
            await first_of(serving, *others)
            if not serving.done():  # one of the others has failed: no model would follow this one
                self.stop()
            status = await serving
            for task in others:
                if task.done():
                    task.result()
            return status
        finally:
            serving.cancel()
            await cancel_and_wait(*others)
            if (prepared := self.take_prepared()) is not None:
                await prepared.stop()

    async def _serve_each(self) -> int:
        name = next(iter(self._checkpoints))
        served = ""  # that was served before
        while True:
            self._loading = name
            try:
                status = await self._service.serve()
            except NotLoaded as error:
                following = self._after_failure(name, served, error)
                if following:
                    await self._wait_until_due(following)
                if not following or self._stopped.is_set():
                    return refuse(error)
            else:
                following = self._service.next_model
                if not following or self._stopped.is_set():
                    return status
                served, self._left_s = name, self._service.left_s
            name = following
            self._service = self._service_of(name)

    def _service_of(self, name: str) -> WorkerService:
        return WorkerService(
            self._settings,
            self._checkpoints[name],
            self._transport.new_queue(),
            self._check,
            self._transport.deployment,
            self.worker_id,
            self,
        )

    async def _check(self) -> Sequence[str]:
        """Checks Redis for the first model alone: later a partition may be away."""
        warnings = () if self._is_checked else await self._transport.check()
        self._is_checked = True
        return warnings

    def _read_cards(self) -> None:
        for name, checkpoint in self._checkpoints.items():
            self._announced[name] = Announcement.before_load(checkpoint, self._settings)

    def _after_failure(self, name: str, served: str, error: Exception) -> str:
        """Returns the model to load after `name` could not be: of those that may be tried again
        soonest the one before it, else the first; empty: none."""
        self.counts.num_failures += 1
        self.counts.load_errors[name] = str(error)
        num_failures = self._failures.get(name, (0, 0.0))[0] + 1
        retry_s = LOAD_RETRY_S * 2 ** (num_failures - 1)
        self._failures[name] = (num_failures, time.monotonic() + retry_s)
        self._claimed = None
        left = [other for other in self._offered() if other != name]
        left.sort(key=lambda other: (self._failing().get(other, 0.0), other != served))
        following = next(iter(left), "")
        log.error(
            "a model of the list cannot be loaded; its jobs stay queued. Correct its files or the "
            "worker's settings and restart the worker, or take it out of PENSTOCK_MODELS",
            extra={
                "model": name,
                "error": str(error),
                "num_failures": num_failures,
                "next_model": following,
            }
            | ({} if num_failures >= MAX_LOAD_FAILURES else {"retry_s": retry_s}),
        )
        return following

    async def _wait_until_due(self, name: str) -> None:
        """Returns when `name` may be loaded again, at once unless it has failed, or at a stop."""
        left_s = self._failing().get(name, 0.0) - time.monotonic()
        if left_s > 0:
            self._loading = ""  # other workers may claim what this one does not load
            log.warning("no model can be loaded now", extra={"retry_s": round(left_s, 1)})
            await first_of(self._stopped.wait(), timeout_s=left_s)

    def _offered(self) -> list[str]:
        """Returns the names of the models that can be loaded, as far as is known."""
        return [
            name
            for name in self._checkpoints
            if self._failures.get(name, (0, 0.0))[0] < MAX_LOAD_FAILURES
        ]

    async def _prepare_often(self) -> None:
        """Keeps a process of our own engine ready, which has imported torch: most of the time that
        a small model takes to load."""
        while True:
            if self._prepared is not None and not self._prepared.is_alive:
                dead, self._prepared = self._prepared, None
                await dead.stop()
                await self._pause_preparing("it died")
            elif self._prepared is None and not self._loading:
                path = self._checkpoints[self._service.model_name].path
                options = self._settings.engine_options(path)
                try:
                    self._prepared = await EngineLink.start(Prepare(options))
                except OSError as error:  # no process, no socket
                    await self._pause_preparing(str(error))
            await asyncio.sleep(LOOK_S)

    async def _pause_preparing(self, error: str) -> None:
        pause_s = self._preparing.next_s()
        log.warning(
            "no engine process waits for the next model, whose load takes longer so",
            extra={"error": error, "retry_s": pause_s},
        )
        await asyncio.sleep(pause_s)

    # Implements worker.service.Swaps.

    def take_prepared(self) -> EngineLink | None:
        """Returns the engine process that waits for its model, if there is one."""
        if self._prepared is None or not self._prepared.is_alive:
            return None
        prepared, self._prepared = self._prepared, None
        self._preparing.reset()
        return prepared

    async def due(self, jobs: RunningJobs, order: StandingOrder) -> str:
        """Returns the name of the model that is to be served next, once it is claimed."""
        current = self._service.model_name
        while True:
            # First, so that a model that was just loaded gets its jobs.
            await asyncio.sleep(LOOK_S)
            self._is_idle = not len(jobs)
            if order.is_draining:
                continue
            found = next_model(
                current,
                self._queues,
                is_idle=self._is_idle,
                bound_ms=self._bound_ms,
                swap_ms=self._swap_ms,
                not_now=self._failing(),
            )
            if found is not None and await self._claim(found, jobs):
                return found.model

    async def confirm(self) -> bool:
        """Returns whether the model of `due` is still this worker's to load, now that no job runs.

        If not, or if the store does not answer, the claim is given up.
        """
        found = self._claimed
        assert found is not None, "confirm follows due"
        try:
            if not self.is_lost.is_set() and await self._try_to_claim(found, drains=False):
                return True
        except TransportError as error:
            log.debug("failed to confirm the claim of a model", extra={"error": str(error)})
        self._claimed = None
        log.info(
            "the next model is not this worker's to load; it serves its own again",
            extra={"model": self._service.model_name, "next_model": found.model},
        )
        return False

    def loaded(self, model: LoadedModel) -> None:
        """Takes the figures of a model that is served now."""
        now_s = time.monotonic()
        self._announced[model.name] = Announcement(model.card, model.blobs)
        self._failures.pop(model.name, None)
        self.counts.load_errors.pop(model.name, None)
        if self._claimed is not None and self._claimed.model == model.name:
            swap_s = now_s - self._left_s
            self.counts.num_swaps += 1
            self.counts.seconds += swap_s
            self._swap_s = swap_s
            log.info(
                "another model is served",
                extra={
                    "model": model.name,
                    "drain_s": round(self._left_s - self._claimed_s, 3),
                    "swap_s": round(swap_s, 3),
                },
            )
        self._claimed, self._loading = None, ""

    @property
    def _bound_ms(self) -> int:
        return round(1000 * self._settings.model_swap_wait_s)

    @property
    def _swap_ms(self) -> int:
        return round(1000 * self._swap_s)

    def _failing(self) -> dict[str, float]:
        """Returns the models that are not to be loaded now, and from when on they may be."""
        now_s = time.monotonic()
        return {name: due_s for name, (_, due_s) in self._failures.items() if now_s < due_s}

    async def _try_to_claim(self, found: WaitingModel, *, drains: bool) -> bool:
        async with self._claiming:
            is_claimed = await self._transport.offers.claim(
                self.worker_id,
                found.model,
                self._settings.lease_ms,
                unserved=not found.num_workers,
                drains=drains,
            )
            if is_claimed:
                self.is_lost.clear()
                self._claimed = found
            return is_claimed

    async def _claim(self, found: WaitingModel, jobs: RunningJobs) -> bool:
        drains = not self._is_idle
        try:
            is_claimed = await self._try_to_claim(found, drains=drains)
            if is_claimed and not drains and len(jobs):  # one came meanwhile: it drains after all
                await self._try_to_claim(found, drains=True)
        except TransportError as error:
            log.debug("failed to claim a model", extra={"error": str(error)})
            return False
        if is_claimed:
            self._claimed_s = time.monotonic()
            log.info(
                "loading another model next: its jobs wait",
                extra={
                    "model": self._service.model_name,
                    "next_model": found.model,
                    "num_waiting": found.num_waiting,
                    "waited_s": round(found.oldest_ms / 1000, 3),
                },
            )
        return is_claimed

    async def _offer_often(self) -> None:
        outage = RateLimitedOutageLog(
            log,
            failing="the models of the list cannot be offered",
            recovered="the models of the list are offered again",
            of=STORE,
        )
        backoff = Backoff(LOOK_S, 5.0)
        while True:
            try:
                async with self._claiming:
                    await self._offer()
                outage.succeeded()
                backoff.reset()
                await asyncio.sleep(LOOK_S)
            except TransportError as error:
                self._queues = ()
                outage.failed(error=str(error))
                await backoff.wait()

    async def _offer(self) -> None:
        claimed = self._claimed.model if self._claimed else self._loading
        self._queues = await self._transport.offers.offer(
            self.worker_id,
            self._offered(),
            life_ms=self._settings.lease_ms,
            bound_ms=0 if self._is_idle else self._bound_ms,
            swap_ms=self._swap_ms,
            claimed=claimed,
            failed=tuple(self.counts.load_errors),
        )
        if any(queue.is_claimed for queue in self._queues if queue.model == claimed):
            self.is_lost.set()

    async def _announce_often(self) -> None:
        """Keeps the cards of the models that are not served now; the service announces its own."""
        queue = self._transport.queue
        while True:
            try:
                for name in self._offered():
                    if name != self._service.model_name or self._loading:
                        found = self._announced[name]
                        await queue.announce(name, found.card.to_json(), found.blobs)
            except TransportError as error:
                log.debug("failed to announce the models", extra={"error": str(error)})
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)


def open_worker(
    settings: WorkerSettings,
    checkpoints: Sequence[Checkpoint],
    transport: WorkerTransport,
    worker_id: str,
) -> WorkerService | SwappingWorker:
    """Returns the worker of one model, or of several."""
    if len(checkpoints) > 1:
        return SwappingWorker(settings, checkpoints, transport, worker_id)
    return WorkerService(
        settings,
        checkpoints[0],
        transport.queue,
        transport.check,
        transport.deployment,
        worker_id,
    )

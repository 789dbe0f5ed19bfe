"""WorkerService: one worker from start to stop.

    queue -> Intake -> JobRunner -> engine process
                       |      ^             |
    log  <- Publisher <+      +---- EngineSupervisor

JobRunner changes the table of running jobs. Its methods do not wait, so no two of them interleave,
whichever task calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from shared.backoff import Backoff
from shared.huge_pages import collapse_heap
from shared.logs import host_name
from shared.outages import STORE, RateLimitedOutageLog
from shared.process import report_ready, report_refusal
from shared.tasks import cancel_and_wait, first_of
from shared.text.base import TextInvalid
from shared.tracing_export import open_tracing
from shared.transport.ports.deployment import Deployment
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import CrashCause, JobQueue
from shared.transport.ports.registry import Order
from worker.checkpoint import Checkpoint, LoadedModel, TextFiles
from worker.heartbeat import Heartbeat, LoadReport, SwapCounts, WorkerProbes
from worker.intake import AdmissionEstimator, Intake
from worker.job_runner import JobRunner
from worker.loading import report_loading
from worker.lora import parse_lora_modules
from worker.metrics import WorkerMetrics, WorkerStateCollector
from worker.prefix_report import PrefixReport
from worker.publisher import FlushPolicy, Publisher, Publishers
from worker.returned_jobs import HAND_BACK_S, RECONCILE_INTERVAL_S, ReturnedJobs
from worker.running_jobs import RunningJob, RunningJobs
from worker.runtime.interpreter import EngineNotLoaded
from worker.runtime.link import EngineDied, EngineLink
from worker.runtime.messages import Configure
from worker.runtime.supervisor import EngineGaveUp, EngineSupervisor
from worker.settings import WorkerSettings
from worker.standing_order import StandingOrder
from worker.traces import PUT_OFF, JobTraces

EXIT_OK = 0
EXIT_BAD_MODEL = 2
EXIT_GAVE_UP = 70

ANNOUNCE_INTERVAL_S = 2.0  # after which a store that lost everything has the model again
FLUSH_BEFORE_RELEASE_S = 1.0

MAX_DRAIN_S = 86_400.0  # for another model; the jobs have deadlines of their own

PULL_BLOCK_MS = 1000  # that one pull waits for a job
HAND_BACK_PREEMPTED_S = 5.0  # after which another worker may have a slot for a preempted job
FLUSH_INTERVAL_S = 0.025  # that tokens are batched at most when appends are slow
FLUSH_TOKENS = 8  # of one job that are sent without waiting

log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[Sequence[str]]]
NotLoaded = (EngineNotLoaded, EngineDied, TextInvalid)  # raised for a model that cannot be served


class Swaps(Protocol):
    """The other models of this worker; see worker.model_swaps."""

    counts: SwapCounts
    order: Order  # of an operator, that the worker has followed so far
    is_lost: asyncio.Event  # another worker serves the model that this one drains for

    async def due(self, jobs: RunningJobs, order: StandingOrder) -> str:
        """Returns the name of the model that is to be served instead, once one is."""
        ...

    async def confirm(self) -> bool:
        """Returns whether that model is still to be served, once no job runs; else the claim of it
        is given up."""
        ...

    def loaded(self, model: LoadedModel) -> None:
        """Takes the model once it is served."""
        ...

    def take_prepared(self) -> EngineLink | None:
        """Returns an engine process that waits for its model, if there is one."""
        ...


class SoleModel:
    """The worker serves one model for its life."""

    def __init__(self) -> None:
        self.counts = SwapCounts()
        self.order = Order.SERVE
        self.is_lost = asyncio.Event()

    async def due(self, jobs: RunningJobs, order: StandingOrder) -> str:
        await asyncio.Event().wait()
        return ""

    async def confirm(self) -> bool:
        return False

    def loaded(self, model: LoadedModel) -> None:
        """Does nothing."""

    def take_prepared(self) -> EngineLink | None:
        return None


class WorkerService:
    """Serves one model from one queue. `run` once; `stop` from a signal handler."""

    def __init__(
        self,
        settings: WorkerSettings,
        checkpoint: Checkpoint,
        queue: JobQueue,
        check: Check,
        deployment: Deployment,
        worker_id: str = "",
        swaps: Swaps | None = None,
    ) -> None:
        """`check` examines Redis: it returns warnings, raises TransportError to be retried, or
        another exception to give up. `deployment` gets the loading progress. `worker_id`: the id
        under which a download was reported; empty: a new one. `swaps` decides when another
        model takes this one's place: `next_model` then has its name after `serve`."""
        self._settings = settings
        self._checkpoint = checkpoint
        self._names = (checkpoint.name, *parse_lora_modules(settings.lora_modules))
        self._queue = queue
        self._check = check
        self._deployment = deployment
        self._swaps = swaps or SoleModel()
        self.next_model = ""  # set when the worker has left the queue for another model
        self.left_s = 0.0  # when its last job had ended, monotonic
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._jobs = RunningJobs(settings.max_num_seqs)
        self.worker_id = worker_id or new_worker_id()
        self._returned = ReturnedJobs(queue, self.worker_id)
        self._tracing = open_tracing("penstock-worker", self.worker_id)
        self.metrics = WorkerMetrics(checkpoint.name, self.worker_id, settings.metrics_names)
        self._supervisor = EngineSupervisor(
            Configure(
                settings.engine_options(checkpoint.path),
                settings.log_level,
                settings.log_format,
                self.worker_id,
            ),
            lambda: self._jobs.num_in_engine > 0,
            load_timeout_s=settings.load_timeout_s,
            stall_limit_s=settings.stall_limit_s,
            max_restarts=settings.engine_restarts,
            take_prepared=self._swaps.take_prepared,
        )
        publishers = [self._new_publisher() for _ in range(settings.partition_count.total)]
        self._publisher = publishers[0] if len(publishers) == 1 else Publishers(publishers)
        self._order = StandingOrder(self.worker_id, self._jobs)
        self._order.receive(self._swaps.order)
        self._prefixes = PrefixReport(
            queue, self.worker_id, settings.lease_ms, self._supervisor.prefixes
        )
        counts = self._swaps.counts
        load = LoadReport(settings, self._jobs, self._supervisor, self._publisher, counts)
        self._heartbeat = Heartbeat(
            queue,
            self.worker_id,
            self._names,
            self._jobs,
            self._supervisor,
            self._publisher,
            self._order,
            lease_ms=settings.lease_ms,
            interval_s=settings.beat_interval_ms / 1000,
            stats=load,
            spent_us=self._supervisor.mask_us,
            on_drop=lambda job_id, attempt, why: self._runner.cancel(job_id, attempt, why),
            on_trouble=lambda: self._intake.suspect(),
            prefixes=self._prefixes,
        )
        self._intake = Intake(
            queue,
            self.worker_id,
            self._jobs,
            self._supervisor,
            AdmissionEstimator(self._jobs, self._supervisor),
            self._order,
            lambda delivery: self._runner.admit(delivery),
            self._repair,
            pull_block_ms=PULL_BLOCK_MS,
            reconcile_interval_s=RECONCILE_INTERVAL_S,
        )
        state = WorkerStateCollector(
            load, self._supervisor, self._publisher, self._heartbeat, self._swaps.counts
        )
        self.metrics.read_from(state)
        self.probes = WorkerProbes(self._supervisor, self._heartbeat)
        # Set when the model is loaded; before that there are no jobs.
        self._model: LoadedModel
        self._runner: JobRunner

    @property
    def model_name(self) -> str:
        return self._checkpoint.name

    def _new_publisher(self) -> Publisher:
        return Publisher(
            self._queue,
            self.worker_id,
            self._settings.lease_ms,
            FlushPolicy(
                flush_interval_s=FLUSH_INTERVAL_S,
                flush_tokens=FLUSH_TOKENS,
                max_unflushed_tokens=self._settings.max_unflushed_tokens,
            ),
            on_settled=lambda settled: self._runner.settle(settled),
            on_rejected=lambda job_id, attempt: self._runner.stop_engine_work(job_id, attempt),
            on_trouble=lambda: self._intake.suspect(),
            on_published=self.metrics.published,
            on_put_off=lambda job_id, attempt: self._runner.cancel(job_id, attempt, PUT_OFF),
        )

    def stop(self) -> None:
        """Drains within the drain timeout and hands back the rest; a second call does so now."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def run(self) -> int:
        """Returns the exit status, after all jobs are handed back and the engine has ended."""
        try:
            return await self.serve()
        except NotLoaded as error:
            return refuse(error)

    async def serve(self) -> int:
        """Returns the exit status as `run` does. Raises one of NotLoaded for a model that cannot
        be served."""
        starting = asyncio.create_task(self._start())
        try:
            await first_of(starting, self._stop.wait())
            if not starting.done():
                return EXIT_OK
            starting.result()
            return await self._serve()
        finally:
            await cancel_and_wait(starting)
            await self._supervisor.close()
            await asyncio.to_thread(self._tracing.close)

    async def _start(self) -> None:
        """Loads the model while Redis may still be unavailable."""
        tasks = [asyncio.create_task(self._load()), asyncio.create_task(self._connect())]
        reporting = asyncio.create_task(
            report_loading(
                self._deployment,
                self.worker_id,
                self._checkpoint.name,
                lambda: self._supervisor.progress,
            ),
            name="loading",
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await cancel_and_wait(*tasks, reporting)
        await self._retrying("announcing the model", self._repair)
        await asyncio.to_thread(collapse_heap)
        self._swaps.loaded(self._model)
        report_ready()
        log.info(
            "the worker is ready",
            extra={"worker_id": self.worker_id, "model": self._checkpoint.name},
        )

    async def _load(self) -> None:
        reading = asyncio.create_task(  # beside the engine's load
            asyncio.to_thread(TextFiles.read, self._checkpoint, self._settings)
        )
        try:
            ready = await self._supervisor.start()
            self._model = await asyncio.to_thread(LoadedModel.of, await reading, ready)
        except OSError as error:  # no process, no memory, too many open files
            raise EngineNotLoaded(
                f"The model cannot be loaded: {error}", by_settings=False
            ) from error
        finally:
            await cancel_and_wait(reading)
        self._jobs.max_num_seqs = ready.config.max_num_seqs  # an upstream may have fewer slots
        self._heartbeat.files = self._model.files
        self._runner = JobRunner(
            self._jobs,
            self._model,
            self._publisher,
            self._supervisor.send,
            self.metrics,
            JobTraces(self._tracing, self.worker_id),
        )
        is_own = self._settings.engine == "penstock"  # vLLM's log names its own quantization
        log.info(
            "the model is loaded",
            extra={
                "model": self._model.name,
                "parameters": ready.num_parameters,
                "dtype": ready.dtype,
                "max_model_len": ready.config.max_model_len,
                "kv_capacity_tokens": ready.config.capacity_tokens,
                "load_s": ready.load_s,
                "engine": ready.engine_name,
                "engine_version": ready.engine_version,
                "exact_resume": ready.exact_resume,
                "default_sampling": self._model.card.default_sampling,
            }
            | ({"quantization": self._settings.quantization} if is_own else {}),
        )
        for warning in self._model.shortcomings():
            log.warning(warning, extra={"model": self._model.name})
        if not ready.exact_resume:
            log.warning(
                "resume is not exact: an output that was cut may continue with other tokens"
                + (
                    "; PENSTOCK_BATCH_INVARIANT makes it exact for native model families on one GPU"
                    if is_own
                    else ""
                ),
                extra={"model": self._model.name, "engine": ready.engine_name},
            )

    async def _connect(self) -> None:
        for warning in await self._retrying("reaching Redis", self._check):
            log.warning(warning)

    async def _retrying(self, what: str, action: Callable[[], Awaitable[Any]]) -> Any:
        backoff = Backoff(0.1, 2.0)
        outage = RateLimitedOutageLog(
            log, failing="waiting for Redis", recovered="Redis is available", of=STORE
        )
        while True:
            try:
                result = await action()
                outage.succeeded()
                return result
            except TransportError as error:
                outage.failed(action=what, error=str(error))
                await backoff.wait()

    async def _repair(self) -> None:
        """Restores this worker's records that Redis may have lost. Raises TransportError."""
        await self._heartbeat.send()  # first the lease: nothing is claimed without it
        await self._queue.setup(self._names)
        await self._announce()

    async def _announce(self) -> None:
        for card in self._model.cards:
            await self._queue.announce(card.name, card.to_json(), self._model.blobs)

    async def _serve(self) -> int:
        others = [
            asyncio.create_task(job, name=name)
            for name, job in {
                "engine": self._supervisor.serve(
                    self._runner.take, self._on_death, self._publisher.has_capacity
                ),
                "watch": self._supervisor.watch(),
                "publisher": self._publisher.run(),
                "heartbeat": self._heartbeat.run(),
                "prefixes": self._prefixes.run(),
                "announcer": self._announce_often(),
                "cancellations": self._listen(),
                "preempted": self._hand_back_preempted(),
            }.items()
        ]
        ordered = asyncio.create_task(self._order.exit_ordered(), name="ordered exit")
        status = EXIT_OK
        left: list[RunningJob] = []
        try:
            while True:
                await self._take_jobs(others, ordered)
                left = await self._drain_beside(others)
                if self.next_model and self._order.order is Order.DRAIN:
                    self._swaps.is_lost.set()  # it may take no jobs of another model either
                if self.next_model and self._swaps.is_lost.is_set() and len(self._jobs):
                    await self._swaps.confirm()  # without a question: the claim is given up
                    self.next_model = ""
                    await self._report_stopping(False)
                    continue
                if self._stop.is_set() or self._order.order is Order.EXIT:
                    self.next_model = ""
                if not self.next_model or await self._is_confirmed(others):
                    break
                self.next_model = ""
                await self._report_stopping(False)
            # A supervisor that reads this does not start it again.
            if self._order.order is Order.EXIT and not self._stop.is_set():
                report_refusal("an operator ordered it to exit")
        except EngineGaveUp as error:
            log.critical("giving up", extra={"error": str(error)})
            status, self.next_model = EXIT_GAVE_UP, ""
        finally:
            await cancel_and_wait(ordered, *others)
        self.left_s = time.monotonic()
        if self.next_model:
            leaving = asyncio.create_task(self._retrying("leaving the queue", self._leave_for_next))
            await first_of(leaving, self._stop.wait())
            if leaving.done():
                leaving.result()
                self._swaps.order = self._order.order
                return EXIT_OK
            await cancel_and_wait(leaving)
            self.next_model = ""
        await self._returned.leave_for_good([*left, *self._jobs])
        return status

    async def _take_jobs(
        self, others: Sequence[asyncio.Task[None]], ordered: asyncio.Task[None]
    ) -> None:
        """Takes jobs until the worker is to drain: for the next model, to exit, or at a stop."""
        intake = asyncio.create_task(self._intake.run(), name="intake")
        due = asyncio.create_task(self._swaps.due(self._jobs, self._order), name="next model")
        try:
            await first_of(intake, *others, ordered, due, self._stop.wait())
            _raise_the_first(intake, *others, due)
            if due.done() and not ordered.done():
                self.next_model = due.result()
        finally:
            await cancel_and_wait(intake, due)

    async def _is_confirmed(self, others: Sequence[asyncio.Task[None]]) -> bool:
        """Returns whether the next model is to be loaded: not if another worker does by now."""
        confirming = asyncio.create_task(self._swaps.confirm(), name="confirm")
        try:
            await first_of(confirming, *others, self._stop.wait())
            _raise_the_first(*others)
            if confirming.done():
                return bool(confirming.result())
            self.next_model = ""
            return True
        finally:
            await cancel_and_wait(confirming)

    async def _drain_beside(self, others: Sequence[asyncio.Task[None]]) -> list[RunningJob]:
        """Drains, unless one of the tasks that it relies on fails."""
        draining = asyncio.create_task(self._drain(), name="drain")
        releasing = asyncio.create_task(self._returned.release_lost(self._jobs), name="release")
        try:
            await first_of(draining, releasing, *others)
            _raise_the_first(releasing, *others)
            return draining.result()
        finally:
            await cancel_and_wait(draining, releasing)

    async def _on_death(self, cause: CrashCause) -> None:
        await self._returned.died(self._runner.take_from_engine(), cause)
        self._intake.suspect()

    async def _hand_back_preempted(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            waiting = self._runner.take_preempted(HAND_BACK_PREEMPTED_S)
            await self._returned.release_preempted(waiting)

    async def _listen(self) -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                async for job_id in self._queue.cancellations(self.worker_id):
                    backoff.reset()
                    self._runner.cancel(job_id, None, "cancelled")
            except TransportError as error:
                log.debug("failed to receive cancellations", extra={"error": str(error)})
            await backoff.wait()

    async def _announce_often(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)
            try:
                await self._announce()
            except TransportError as error:
                log.debug("failed to announce the model", extra={"error": str(error)})

    async def _drain(self) -> list[RunningJob]:
        """Takes no new jobs; running ones may finish until the timeout or a second stop.

        Returns the jobs that have not ended by then, removed from the table, to be handed back.
        """
        following = {"next_model": self.next_model} if self.next_model else {}
        log.info(
            "draining: the worker takes no new jobs",
            extra={"num_jobs": len(self._jobs), **following},
        )
        await self._report_stopping(True)
        if self.next_model:  # no waiting job cuts off a running one
            await first_of(self._jobs_end(self._stop, MAX_DRAIN_S), self._swaps.is_lost.wait())
            if self._swaps.is_lost.is_set() and not self._stop.is_set():
                return []
        await self._jobs_end(self._stop_now, self._settings.drain_timeout_s)
        if not len(self._jobs):
            return []
        self._runner.stop_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_BEFORE_RELEASE_S):
                await self._publisher.flushed()
        return self._runner.take_all()

    async def _report_stopping(self, is_stopping: bool) -> None:
        self._heartbeat.is_stopping = is_stopping
        with contextlib.suppress(TransportError, TimeoutError):
            # Others learn it from this heartbeat; without it, from the next.
            async with asyncio.timeout(HAND_BACK_S):
                await self._heartbeat.send()

    async def _jobs_end(self, stop: asyncio.Event, limit_s: float) -> None:
        """Returns when no job runs, with `stop`, or after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while len(self._jobs) and not stop.is_set():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            self._jobs.changed.clear()
            await first_of(self._jobs.changed.wait(), stop.wait(), timeout_s=left_s)

    async def _leave_for_next(self) -> None:
        await self._heartbeat.send()  # notices a partition that is back
        await self._returned.leave(returns=True)


def refuse(error: Exception) -> int:
    """Reports a model that cannot be served, one of NotLoaded; returns the exit status."""
    log.critical("the model cannot be served", extra={"error": str(error)})
    report_refusal(str(error))
    by_settings = isinstance(error, TextInvalid) or (
        isinstance(error, EngineNotLoaded) and error.by_settings
    )
    return EXIT_BAD_MODEL if by_settings else EXIT_GAVE_UP


def _raise_the_first(*tasks: asyncio.Task[Any]) -> None:
    """Raises the exception of the first task that has ended: they run until cancelled."""
    for task in tasks:
        if task.done():
            task.result()


def new_worker_id() -> str:
    """Returns a new id: a second consumer of the same name would inherit the first one's jobs."""
    return f"{host_name()}-{uuid.uuid4().hex[:12]}"

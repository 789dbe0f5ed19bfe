"""EngineSupervisor: keeps an engine process alive, reads it, restarts it within a bound."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from shared.backoff import Backoff
from shared.cuda_devices import is_device
from shared.transport.ports.queue import CrashCause
from worker.engine.measures import Counts, StepMeasures
from worker.runtime.compilers import is_compiling
from worker.runtime.held_prefixes import HeldPrefixes
from worker.runtime.interpreter import EngineNotLoaded
from worker.runtime.link import EngineDied, EngineLink
from worker.runtime.messages import (
    Configure,
    EngineEnds,
    EngineReady,
    RequestRejected,
    StepOutputs,
    ToEngine,
)

RESTART_WINDOW_S = 600.0
WATCH_INTERVAL_S = 0.25
PROGRESS_LOG_S = 2.0
COMPILE_LOOK_S = 1.0  # without a message, after which compilers are looked for
COMPILE_LIMIT_S = 600.0

log = logging.getLogger(__name__)


class EngineGaveUp(Exception):
    """The engine died more often than it may be restarted."""


class EngineSupervisor:
    """One engine process at a time.

    `serve` passes every message to `on_message` and waits for `has_capacity` before each: while the
    Redis is unavailable and enough output is buffered, the engine is not read and pauses by itself.
    `watch` kills an engine that makes no progress.
    """

    def __init__(
        self,
        configure: Configure,
        has_work: Callable[[], bool],
        *,
        load_timeout_s: float,
        stall_limit_s: float,
        max_restarts: int,
        take_prepared: Callable[[], EngineLink | None] = lambda: None,
    ) -> None:
        """`has_work` returns whether the engine has anything to compute: else it may be silent.
        `take_prepared` returns a process that waits for Configure, if there is one."""
        self._take_prepared = take_prepared
        self._configure = configure
        self._has_work = has_work
        self._load_timeout_s = load_timeout_s
        self._stall_limit_s = stall_limit_s
        self._max_restarts = max_restarts
        self._deaths_s: deque[float] = deque()
        self._backoff = Backoff(0.1, 10.0, factor=4.0)
        self._link: EngineLink | None = None
        self._killed: EngineLink | None = None  # because it made no progress
        self._paused = False
        self._quiet_s = 0.0
        self._compile_s = 0.0  # part of `_quiet_s` in which a compiler ran
        self.up = asyncio.Event()  # set while jobs may be sent
        self.progress = ("starting", 0.0)  # of a load: its stage, and the share that is done
        self.num_restarts = 0
        self.num_device_failures = 0
        self.is_failing = False  # the device failed, and no token has come since
        self._has_output = False  # this engine process has given a token
        self.stats: dict[str, int] = {}
        self.measures: dict[str, Counts] = StepMeasures().counts()
        self.mask_us: Counter[str] = Counter()  # of masks, by tenant, since the last report
        self.prefixes = HeldPrefixes()  # of its prefix cache
        self.ready: EngineReady | None = None

    async def start(self) -> EngineReady:
        """Starts the first engine. Raises EngineNotLoaded, or EngineDied when it died loading."""
        link = await self._open_link()
        ready = await self._load(link)
        self.up.set()
        return ready

    async def serve(
        self,
        on_message: Callable[[StepOutputs | RequestRejected], None],
        on_death: Callable[[CrashCause], Awaitable[None]],
        has_capacity: asyncio.Event,
    ) -> None:
        """Runs until cancelled. Raises EngineGaveUp.

        When an engine dies, `on_death` gives its jobs back to the queue and a new one is started.
        """
        last_error, is_outage = "", False
        while True:
            try:
                await self._read(on_message, has_capacity)
            except EngineDied as died:
                self.up.clear()
                self.stats = dict.fromkeys(
                    self.stats, 0
                )  # nothing runs until its successor reports
                self.prefixes.clear()
                log.error(
                    "the engine process died", extra={"engine_pid": self.pid, "detail": str(died)}
                )
                has_stalled = self._killed is not None and self._killed is self._link
                await self.close()
                cause = CrashCause.STALL if has_stalled else CrashCause.ENGINE
                if died.by_device:
                    self.num_device_failures += 1
                    self.is_failing = True
                    cause = CrashCause.PROVEN_DEVICE if self._has_output else CrashCause.DEVICE
                if died.by_upstreams:
                    self.is_failing = True
                    cause = CrashCause.UPSTREAM
                await on_death(cause)
                last_error, is_outage = str(died), died.by_upstreams
            await self._restart(last_error, is_outage)

    async def _read(
        self,
        on_message: Callable[[StepOutputs | RequestRejected], None],
        has_capacity: asyncio.Event,
    ) -> None:
        assert self._link is not None, "serve follows start"
        while True:
            if not has_capacity.is_set():
                await self._pause(has_capacity)
            match await self._link.receive():
                case StepOutputs() as step:
                    if step.stats is not None:
                        self.stats = step.stats
                    if step.measures is not None:
                        self.measures = step.measures
                    self.prefixes.change(step.prefixes)
                    for tenant, seconds in step.mask_s.items():
                        self.mask_us[tenant] += round(seconds * 1e6)
                    if not self._has_output and any(o.token_ids for o in step.outputs):
                        self._has_output, self.is_failing = True, False
                    on_message(step)
                case EngineEnds(message, by_upstreams):
                    raise EngineDied(
                        None, message, by_device=not by_upstreams, by_upstreams=by_upstreams
                    )
                case RequestRejected() as rejected:
                    on_message(rejected)
                case other:
                    raise EngineDied(None, f"unexpected {type(other).__name__}")

    async def _pause(self, has_capacity: asyncio.Event) -> None:
        log.warning("the engine pauses until its output can be stored")
        self._paused = True
        try:
            await has_capacity.wait()
        finally:
            self._paused = False
        log.warning("the engine continues")

    def send(self, message: ToEngine) -> None:
        """Sends to the current engine. Lost when that is dead; `on_death` repairs this."""
        if self._link is not None:
            self._link.send(message)

    @property
    def pid(self) -> int | None:
        return self._link.pid if self._link is not None else None

    @property
    def step_age_s(self) -> float:
        """Seconds without a message from the engine although it has work; 0 when idle or paused.

        Counted by `watch`, so that time in which this process was stopped does not count.
        """
        return self._quiet_s

    @property
    def stalled(self) -> bool:
        """True from half of the stall limit on, at which the engine is killed, and while an engine
        whose device failed has no successor."""
        is_down = self.is_failing and not self.up.is_set()
        return is_down or self.step_age_s > self._stall_limit_s / 2

    @property
    def is_lost(self) -> bool:
        """True beyond the stall limit: other workers should take the jobs."""
        return self.step_age_s > self._stall_limit_s

    async def close(self) -> None:
        """Ends the engine process. Idempotent."""
        link, self._link = self._link, None
        self.up.clear()
        if link is not None:
            await link.stop()

    async def watch(self) -> None:
        """Runs until cancelled."""
        num_seen = 0
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            link = self._link
            if link is None or self._paused or not self._has_work():
                self._quiet_s = 0.0
                continue
            if link.num_received != num_seen:
                num_seen = link.num_received
                self._quiet_s = self._compile_s = 0.0
                continue
            self._quiet_s += WATCH_INTERVAL_S
            if self._quiet_s >= COMPILE_LOOK_S and await self._is_compiling(link.pid):
                self._quiet_s = 0.0
            if self.is_lost and link is not self._killed:  # its end may be reported later
                log.error(
                    "the engine made no progress and was killed",
                    extra={"engine_pid": link.pid, "step_age_s": self._quiet_s},
                )
                self._killed = link
                link.kill()

    async def _is_compiling(self, engine_pid: int) -> bool:
        """Returns whether the engine waits for a compiler: kernels may be compiled at first use.

        True for at most COMPILE_LIMIT_S after its last message.
        """
        if self._compile_s >= COMPILE_LIMIT_S:
            return False
        if not await asyncio.to_thread(is_compiling, engine_pid):  # it leads its own session
            return False
        self._compile_s += self._quiet_s
        return True

    async def _restart(self, last_error: str, is_outage: bool) -> None:
        """Starts successors until one is loaded. Raises EngineGaveUp.

        `is_outage`: no upstream answered, which counts as no death: the successor waits for one.
        """
        while True:
            now_s = time.monotonic()
            if not is_outage:
                self._deaths_s.append(now_s)
            is_outage = False
            while self._deaths_s and now_s - self._deaths_s[0] > RESTART_WINDOW_S:
                self._deaths_s.popleft()
            if len(self._deaths_s) > self._max_restarts:
                raise EngineGaveUp(
                    f"the engine died or could not be started {len(self._deaths_s)} times within "
                    f"{RESTART_WINDOW_S:.0f} seconds, the last time with: {last_error}"
                )
            await asyncio.sleep(self._backoff.delay_s(len(self._deaths_s)))
            self.num_restarts += 1
            try:
                await self._load(await self._open_link())
            except (
                EngineDied,
                EngineNotLoaded,
                OSError,
            ) as error:  # OSError: no process, no socket
                log.error("the engine failed to restart", extra={"error": str(error)})
                last_error = str(error)
                await self.close()
                continue
            self.up.set()
            log.warning("the engine was restarted", extra={"num_restarts": self.num_restarts})
            return

    async def _open_link(self) -> EngineLink:
        self._has_output = False
        self._link = self._take_prepared()
        if self._link is not None:
            self._link.send(self._configure)
        else:
            self._link = await EngineLink.start(self._configure)
        return self._link

    def _keep_device(self, chosen: str) -> None:
        """Gives the device that `auto` has chosen to every successor: where a GPU is lost, it must
        not become a CPU's worker that takes jobs. vLLM has more kinds of devices than the setting.
        """
        options = self._configure.options
        if options.device == "auto" and is_device(chosen):
            self._configure = msgspec.structs.replace(
                self._configure, options=replace(options, device=chosen)
            )

    async def _load(self, link: EngineLink) -> EngineReady:
        logged_s = 0.0
        logged = ("", 0)

        def on_progress(stage: str, fraction: float) -> None:
            nonlocal logged_s, logged
            self.progress = (stage, fraction)
            now_s, shown = time.monotonic(), (stage, round(100 * fraction))
            if shown != logged and (now_s - logged_s >= PROGRESS_LOG_S or fraction >= 1.0):
                logged_s, logged = now_s, shown
                log.info(
                    "the engine is loading the model", extra={"stage": stage, "percent": shown[1]}
                )

        try:
            async with asyncio.timeout(self._load_timeout_s):
                self.ready = await link.ready(on_progress)
        except TimeoutError:
            raise EngineDied(
                None, f"the model was not loaded within {self._load_timeout_s:g} seconds"
            ) from None
        self.stats = self.ready.stats  # a heartbeat before the first step has them all
        self._keep_device(self.ready.device)
        return self.ready

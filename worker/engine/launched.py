"""LaunchedStep: a step between its launch and its end. FailedLaunch: one whose launch raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn

from worker.engine.errors import EngineFailed
from worker.engine.pacer import ChunkPacer
from worker.engine.plan import Schedule
from worker.engine.ports import ModelRunner, StepResult
from worker.engine.sequence import Sequence

log = logging.getLogger(__name__)


class LaunchedStep:
    """A plan and the runner's handle for it. Each method raises the runner's errors."""

    __slots__ = ("_clock", "_handle", "_host_s", "schedule")

    def __init__(self, runner: ModelRunner, schedule: Schedule, clock: Callable[[], float]) -> None:
        """Launches the step."""
        self.schedule = schedule
        self._clock = clock
        begin_s = clock()
        self._handle = runner.launch(schedule.batch)
        self._host_s = clock() - begin_s  # of the runner's calls

    def sample_structured(self) -> dict[Sequence, Future[None]]:
        """Samples the sequences with a grammar that have not ended meanwhile. Returns those that
        are put off, each with the future that it waits for.

        All tokens of the steps before have to be committed.
        """
        all_structured = self.schedule.structured
        if not all_structured:
            return {}
        structured = [s for s in all_structured if not s.is_finished]
        begin_s = self._clock()
        put_off = self._handle.sample_structured([s.seq_id for s in structured])
        self._host_s += self._clock() - begin_s
        return {s: put_off[s.seq_id] for s in structured if s.seq_id in put_off}

    def collect(self, pacer: ChunkPacer | None) -> StepResult:
        """Waits for the device; the pacer learns how long this very step took."""
        begin_s = self._clock()
        result = self._handle.collect()
        if pacer is not None and not self.schedule.has_loaded:
            seconds = result.device_s
            if seconds is None:
                seconds = self._host_s + self._clock() - begin_s
            batch = self.schedule.batch
            pacer.took(batch.num_decodes, batch.num_tokens - batch.num_decodes, seconds)
        return result

    def discard(self) -> None:
        """Waits for the device and drops the result. Raises EngineFailed only."""
        try:
            self._handle.collect()
        except EngineFailed:
            raise
        except Exception as error:
            log.debug("the step after the failed one failed too", exc_info=error)


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A step whose launch raised. It fails when it is its turn to be collected: the step before it
    may have tokens of the same sequences."""

    schedule: Schedule
    error: Exception

    def collect(self, pacer: ChunkPacer | None) -> NoReturn:
        """Raises what the launch raised."""
        raise self.error

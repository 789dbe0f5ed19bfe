"""LaunchedStep: a step between its launch and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.engine.errors import EngineFailed
from worker.engine.pacer import ChunkPacer
from worker.engine.plan import Schedule
from worker.engine.ports import ModelRunner, StepResult

logger = logging.getLogger(__name__)


class LaunchedStep:
    """A plan, and the runner's handle of it. Each method passes on what the runner raises."""

    def __init__(self, runner: ModelRunner, schedule: Schedule, clock: Callable[[], float]) -> None:
        """Launches the step."""
        self.schedule = schedule
        self._clock = clock
        self._host_s = 0.0  # of the calls of the runner
        with self._timed():
            self._handle = runner.launch(schedule.batch)

    def sample_structured(self) -> None:
        """Samples the sequences with a grammar that have not ended meanwhile.

        All tokens of the steps before have to be committed.
        """
        structured = self.schedule.structured
        if structured:
            with self._timed():
                self._handle.sample_structured([s.seq_id for s in structured if not s.is_finished])

    def collect(self, pacer: ChunkPacer | None) -> StepResult:
        """Waits for the device; the pacer learns how long this very step took."""
        with self._timed():
            result = self._handle.collect()
        if pacer is not None:
            batch = self.schedule.batch
            seconds = self._host_s if result.device_s is None else result.device_s
            pacer.took(batch.num_decodes, batch.num_tokens - batch.num_decodes, seconds)
        return result

    def discard(self) -> None:
        """Waits for the device and drops what it says. Raises EngineFailed only."""
        try:
            self._handle.collect()
        except EngineFailed:
            raise
        except Exception as error:
            logger.debug("the step behind it failed too", exc_info=error)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin_s = self._clock()
        yield
        self._host_s += self._clock() - begin_s

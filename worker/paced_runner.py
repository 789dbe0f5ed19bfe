"""PacedRunner: a ModelRunner whose steps take a set time, as a device's would."""

from __future__ import annotations

import time

from worker.engine.batch import ScheduledBatch
from worker.engine.ports import ModelRunner, StepHandle, StepResult


class PacedRunner:
    """Wraps another runner; `collect` returns no sooner than `step_s` after `launch`."""

    def __init__(self, inner: ModelRunner, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self.vocab_size = inner.vocab_size

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        return _PacedStep(self._inner.launch(batch), time.monotonic() + self._step_s)


class _PacedStep:
    def __init__(self, inner: StepHandle, ready_at_s: float) -> None:
        self._inner = inner
        self._ready_at_s = ready_at_s

    def collect(self) -> StepResult:
        time.sleep(max(0.0, self._ready_at_s - time.monotonic()))
        return self._inner.collect()

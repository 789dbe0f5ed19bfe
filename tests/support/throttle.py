"""Throttle: makes the middle of an answer last until a test has done there what it came for.

A test that injects a fault "after ten tokens" races the engine, which on a busy machine may have
sent all tokens by then. With the throttle on, the engine sends the first tokens as fast as ever and
then one in a long while, so that what runs goes on running; `release` ends that. The processes get
`env` and tests/support/faults on their PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.faults.sitecustomize import THROTTLE

FAULTS = Path(__file__).resolve().parent / "faults"
SLOW_STEP_S = 0.25


class Throttle:
    """One for all engines that were started with its `env`. Released at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.env = {THROTTLE: str(path)}

    def apply(self, after_tokens: int, step_s: float = SLOW_STEP_S) -> None:
        """Steps that go beyond so many tokens of an answer take at least `step_s`."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{after_tokens} {step_s}")
        os.replace(new, self._path)  # engines look at every step: never half a file

    def release(self) -> None:
        """Idempotent."""
        self._path.unlink(missing_ok=True)

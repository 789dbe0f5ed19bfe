"""Brake: makes the middle of an answer last until a test has done there what it came for.

A test that breaks something "after ten tokens" races the engine, which on a busy machine may have
said everything by the time the test gets to it. With the brake on, the engine says the first tokens
as fast as ever and then one in a long while, so that what runs goes on running; `release` lets it
go. The processes get `env` and tests/support/faults on their PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.faults.sitecustomize import BRAKE

FAULTS = Path(__file__).resolve().parent / "faults"
SLOW_STEP_S = 0.25


class Brake:
    """One for all engines that were started with its `env`. Released at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.env = {BRAKE: str(path)}

    def apply(self, after_tokens: int, step_s: float = SLOW_STEP_S) -> None:
        """Steps that go beyond so many tokens of an answer take at least `step_s`."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{after_tokens} {step_s}")
        os.replace(new, self._path)  # engines look at every step: never half a file

    def release(self) -> None:
        """Idempotent."""
        self._path.unlink(missing_ok=True)

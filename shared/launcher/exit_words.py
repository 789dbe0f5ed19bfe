"""How a process ended, in a word or two."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """E.g. `SIGKILL` or `exit code 3`, from a return code as `subprocess` gives it."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"

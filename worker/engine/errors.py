"""What the engine says no with.

RequestRefused      the caller's: this request, as it is, cannot be run
  EngineFull        the caller's: not now; the same request may be taken later
IntegrityError      ours: the books do not balance, nothing the engine says can be trusted any more

What a device does wrong is neither: it ends the sequences concerned, in an EngineOutput.
"""

from __future__ import annotations

from shared.messages import ErrorCode


class RequestRefused(Exception):
    """Nothing was changed. `code` is for programs, `message` a sentence for the caller."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EngineFull(RequestRefused):
    """As many sequences wait as may wait; nothing is wrong with the request."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(ErrorCode.ENGINE_ERROR, f"{max_waiting} sequences are waiting already")


class IntegrityError(Exception):
    """An invariant of the engine is broken: a mistake of ours. Start a new engine."""

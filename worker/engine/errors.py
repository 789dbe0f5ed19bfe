"""The engine's exceptions.

RequestRefused      request error: this request cannot be run
  EngineFull        too many requests wait; the same request may be accepted later
IntegrityError      bug: an invariant is broken, no output of the engine can be trusted any more
OutOfMemory         device error: this step does not fit its memory; a smaller one may
EngineFailed        device error: this process can compute no more steps; a new one may
  DeviceLost        an error of the device that outlives the step in which it occurred
  StepsFailed       several steps in a row raised, or the engine's self-test did
  UpstreamsLost     no server answers that computes for this engine

The fault of one sequence raises none of these: it ends that sequence, in an EngineOutput.
"""

from __future__ import annotations

from shared.messages import ErrorCode


class RequestRefused(Exception):
    """Nothing was changed. `code` is for programs, `message` a sentence for the client."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EngineFull(RequestRefused):
    """The waiting queue is full; nothing is wrong with the request."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(ErrorCode.ENGINE_ERROR, f"{max_waiting} sequences are waiting already")


class IntegrityError(Exception):
    """An invariant of the engine is broken, which is a bug. Start a new engine."""


class OutOfMemory(Exception):
    """Raised by a ModelRunner: the step needs more memory than there is. Nothing else is wrong."""


class EngineFailed(Exception):
    """The engine computes no more steps in this process. Its sequences can resume in another."""


class DeviceLost(EngineFailed):
    """Raised by a ModelRunner: every further step would fail as this one did."""


class StepsFailed(EngineFailed):
    """Steps fail whatever is in them, for a reason that the device does not give."""


class UpstreamsLost(EngineFailed):
    """No server answers that computes for this engine. Nothing is wrong with this machine."""


def failure_named(reason: str) -> tuple[ErrorCode, str]:
    """Returns the code and the sentence of a sampler's reason: a code, and perhaps why."""
    name, _, why = reason.partition(": ")
    known = name in ErrorCode.__members__.values()
    code = ErrorCode(name) if known else ErrorCode.ENGINE_ERROR
    return code, f"the model runner gave this sequence up: {why or reason}"

"""Recoveries: what happens to the worker of a stream's job, for the readers that ask for it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.generation.response_schemas import ResponseModel
from api.http.sse import typed_event
from shared.messages import Started
from shared.transport.ports.jobs import JobLook


class RecoveryWaiting(ResponseModel):
    """The job has lost its worker after `tokens` and waits for another one. `cause`: as of an
    attempt of the job."""

    type: Literal["recovery"] = "recovery"
    state: Literal["waiting"] = "waiting"
    tokens: int
    cause: str | None


class RecoveryResumed(ResponseModel):
    """Another worker has the job, `after_s` seconds after its reader received something last; null:
    no `waiting` came before."""

    type: Literal["recovery"] = "recovery"
    state: Literal["resumed"] = "resumed"
    tokens: int
    worker: str
    after_s: float | None


Recovery = Annotated[RecoveryWaiting | RecoveryResumed, Field(discriminator="state")]


class Recoveries:
    """Makes an event when the job has lost its worker, and one when another worker resumes it."""

    def __init__(self) -> None:
        self._event = b""  # that was not sent yet
        self._lost_attempt: int | None = None  # of the last loss that was found
        self._lost_s: float | None = None  # when its reader had received the last before that

    def __bool__(self) -> bool:
        """Returns whether there is an event."""
        return bool(self._event)

    def take(self) -> bytes:
        """Returns the event, once."""
        event, self._event = self._event, b""
        return event

    def found(self, look: JobLook | None, last_news_s: float) -> bool:
        """Records what a look found; returns whether that is news. `last_news_s`: when the reader
        received something last."""
        if look is None or look.lost_attempt in (None, self._lost_attempt):
            return False
        self._lost_attempt, self._lost_s = look.lost_attempt, last_news_s
        self._tell(RecoveryWaiting(tokens=look.end.num_tokens, cause=look.cause))
        return True

    def started(self, start: Started, num_tokens: int, now_s: float) -> None:
        """Records that a worker has claimed the job. Without an earlier loss `after_s` is null: it
        was too short to be found."""
        if start.attempt > 1:
            after_s = None if self._lost_s is None else round(now_s - self._lost_s, 1)
            self._lost_s = None
            self._tell(RecoveryResumed(tokens=num_tokens, worker=start.worker_id, after_s=after_s))

    def _tell(self, recovery: Recovery) -> None:
        self._event = typed_event(recovery.model_dump())

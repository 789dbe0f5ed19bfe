"""The port of a frontend for dead letters: jobs that killed workers or engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.messages import Job


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One job's dead letter, without its request. Times are milliseconds of the Redis clock."""

    job_id: str
    model: str
    tenant: str
    kind: str
    reason: str  # an ErrorCode's value
    crashes: int  # deaths of workers or engines that it is blamed for
    num_tokens: int  # that it had given
    died_ms: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """A dead letter that was replaced by a new job, `job_id`."""

    tenant: str
    job_id: str


class DeadLetters(Protocol):
    """Keeps jobs that killed workers or engines; `JobStore.requeue` runs one again.

    Bounds (lua/lib/dead_letter.lua): 1000 dead letters, 64 MiB of requests, seven days. The oldest
    are dropped first. Every call may raise TransportError.
    """

    async def list(self, tenant: str | None, limit: int) -> Sequence[DeadLetter]:
        """Returns dead letters, newest first; of all tenants if `tenant` is None."""
        ...

    async def get(self, job_id: str) -> DeadLetter | Requeued | None:
        """Returns a dead letter, or the job that replaced it; None if neither exists."""
        ...

    async def request(self, job_id: str) -> Job | None:
        """Returns the job as submitted; None: no dead letter, or its request was too large to keep.

        Raises PayloadInvalid for one that cannot be read.
        """
        ...

    async def drop(self, job_id: str) -> bool:
        """Deletes the dead letter. False if it does not exist."""
        ...

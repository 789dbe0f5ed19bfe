"""The port of kept prompts, with which a person finds out why a prompt was not cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.transport.ports.jobs import JobRecord


class KeptPrompts(Protocol):
    """Reads prompts of jobs that run, and of those that ended lately.

    Bounds (lua/lib/latch.lua): 256 ended jobs, 32 MiB, as long as texts. Nothing on the path
    of a request reads them. Every call may raise TransportError.
    """

    async def list(
        self, limit: int, tenant: str | None = None, model: str | None = None
    ) -> Sequence[JobRecord]:
        """Returns the records of the ended jobs that have a prompt, the latest end first."""
        ...

    async def tokens(self, job_id: str) -> bytes | None:
        """Returns the prompt's ids as text, each followed by a comma ("1,22,"): of a prompt of
        200,000 tokens a megabyte, which is compared without decoding. None: it is not kept."""
        ...

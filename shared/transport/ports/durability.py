"""Durability: whether accepted work is on the server's disk, or at its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.messages import Durability


@dataclass(frozen=True, slots=True)
class DurabilityFault:
    """Why a server cannot confirm a durability."""

    sentence: str
    is_lasting: bool  # False: it may pass by itself, as a failover or a replica's reconnect does


class DurabilityChecks(Protocol):
    """Every call may raise TransportError."""

    async def durability_fault(
        self, durability: Durability, num_replicas: int
    ) -> DurabilityFault | None:
        """Returns why the server cannot confirm this durability now; None when it can."""
        ...

    async def confirm(
        self,
        kind: str,
        names: Sequence[str],
        durability: Durability,
        num_replicas: int,
        timeout_s: float,
    ) -> bool:
        """Waits once until the records of these of one kind ("job" or "batch"), and all that was
        written before, are as durable as that. Returns False when that was not in time
        (`timeout_s`, at most 10), or a record is missing."""
        ...

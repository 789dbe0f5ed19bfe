"""Deployment: what people look at that no job depends on: processes, tenants, the last hour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

HISTORY_SLOT_S = 30  # lua/lib/history.lua has the same
HISTORY_SLOTS = 120  # that are read: an hour
TTFT_PER_OCTAVE = 8  # buckets, likewise
REPORT_LIFE_MS = 10_000  # of a process's report


class ProcessKind(StrEnum):
    """Processes that report themselves. A serving worker has its heartbeat instead."""

    FRONTEND = "frontend"
    LOADING = "loading"  # a worker whose model is not loaded yet


class Spent(NamedTuple):
    """What came to a tenant's account since the last report."""

    tenant: str
    cpu_us: int  # processor time, microseconds
    refused: int = 0  # requests


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A process's last report."""

    process_id: str
    age_s: float
    stats: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Jobs of a tenant, and the prompt tokens of those that are queued."""

    tenant: str
    queued: int = 0
    running: int = 0
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HistorySlot:
    """What happened in HISTORY_SLOT_S seconds. None: nothing looked in this time.

    `accepted` and `ended` are totals of the deployment at the end of the slot.
    """

    number: int  # Unix time in slots
    queued: int | None = None  # at most
    running: int | None = None  # at most
    accepted: int | None = None
    ended: int | None = None
    # Bucket b of times to the first token, from 2 ** (b / TTFT_PER_OCTAVE) ms up -> jobs.
    ttft: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class History:
    """The slots that were requested, oldest first, and the server's time, Unix seconds."""

    now_s: float
    slots: Sequence[HistorySlot]


class Deployment(Protocol):
    """Every call may raise TransportError."""

    async def report(
        self,
        kind: ProcessKind,
        process_id: str,
        stats: Mapping[str, str | int],
        spent: Sequence[Spent] = (),
    ) -> None:
        """Keeps a process's report for REPORT_LIFE_MS; adds `spent` to the tenants' accounts."""
        ...

    async def reports(self, kind: ProcessKind, limit: int) -> Sequence[ProcessReport]:
        """Returns the processes that reported lately, sorted by id."""
        ...

    async def tenants(self, names: Sequence[str]) -> Sequence[TenantLoad]:
        """Returns the loads of these tenants."""
        ...

    async def history(self, num_slots: int) -> History:
        """Returns the latest slots; the last one is not over."""
        ...

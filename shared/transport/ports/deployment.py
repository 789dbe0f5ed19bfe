"""Deployment: what people look at that no job depends on: processes, tenants, history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

HISTORY_SLOT_S = 30  # lua/lib/history.lua has the same
HISTORY_SLOTS = 120  # that are read: an hour
DAY_SLOT_S = 600  # likewise; each is made from its slots of HISTORY_SLOT_S
DAY_SLOTS = 144
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
class Sample:
    """What a frontend adds to the current slot of the history, by the names of its fields.

    `counts` are added up over all frontends (`errors`, `unavailable`); of `figures` the slot keeps
    the largest (`age_s`, `kv`, `used`, `limit`).
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, int] = field(default_factory=dict)


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
    """What happened in HISTORY_SLOT_S or DAY_SLOT_S seconds. None: nothing looked in this time.

    `accepted`, `ended`, `failed` and `expired` are totals of the deployment at the end of the slot.
    """

    number: int  # Unix time in slots
    queued: int | None = None  # at most
    running: int | None = None  # at most
    accepted: int | None = None
    ended: int | None = None
    # Bucket b of times to the first token, from 2 ** (b / TTFT_PER_OCTAVE) ms up -> jobs.
    ttft: Mapping[int, int] = field(default_factory=dict)
    failed: int | None = None
    expired: int | None = None
    tokens_in: int | None = None  # of the prompts whose first token came
    tokens_out: int | None = None
    unavailable: int | None = None  # responses 503
    errors: int | None = None  # other responses from 500 up
    queue_age_s: int | None = None  # at most, of any model
    kv_permille: int | None = None  # of the KV blocks of all workers in use, at most
    store_used: int | None = None  # bytes, at most
    store_limit: int | None = None  # bytes; 0: no limit


@dataclass(frozen=True, slots=True)
class History:
    """The slots that were requested, oldest first, and the server's time, Unix seconds."""

    now_s: float
    slots: Sequence[HistorySlot]


NO_SAMPLE = Sample()


class Deployment(Protocol):
    """Every call may raise TransportError."""

    async def report(
        self,
        kind: ProcessKind,
        process_id: str,
        stats: Mapping[str, str | int],
        spent: Sequence[Spent] = (),
        sample: Sample = NO_SAMPLE,
    ) -> None:
        """Keeps a process's report for REPORT_LIFE_MS; adds `spent` to the tenants' accounts, and
        `sample` to the history."""
        ...

    async def reports(self, kind: ProcessKind, limit: int) -> Sequence[ProcessReport]:
        """Returns the processes that reported lately, sorted by id."""
        ...

    async def tenants(self, names: Sequence[str]) -> Sequence[TenantLoad]:
        """Returns the loads of these tenants."""
        ...

    async def history(self, num_slots: int, slot_s: int = HISTORY_SLOT_S) -> History:
        """Returns the latest slots; the last one is not over. `slot_s`: or DAY_SLOT_S, whose slots
        are there at most HISTORY_SLOT_S after their end."""
        ...

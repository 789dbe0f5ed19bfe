"""Histories: the last hour and day of the deployment in slots, as the dashboard plots them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from shared.transport.ports.deployment import (
    DAY_SLOT_S,
    DAY_SLOTS,
    HISTORY_SLOT_S,
    HISTORY_SLOTS,
    TTFT_PER_OCTAVE,
    Deployment,
    History,
    HistorySlot,
)

MIN_SPAN_S = 1.0  # of the slot that is not over, for a rate
FOLDED = DAY_SLOT_S // HISTORY_SLOT_S
# How a slot of the day comes from its parts, as lua/lib/history.lua folds it.
_MOST = ("queued", "running", "queue_age_s", "kv_permille", "store_used", "store_limit")
_LAST = ("accepted", "ended", "failed", "expired")
_SUMS = ("tokens_in", "tokens_out", "unavailable", "errors")

Row = tuple[str, dict[str, Any]]


class HistoryRing:
    """Reads a slot once it is over for the last time, and then keeps it."""

    def __init__(self, deployment: Deployment, slot_s: int, num_slots: int) -> None:
        self._deployment = deployment
        self._slot_s = slot_s
        self._num_slots = num_slots
        self._slots: dict[int, HistorySlot] = {}
        self._read_s: float | None = None

    async def read(self) -> History:
        """Returns all slots. Raises TransportError."""
        num_slots = self._num_slots
        begun_s = time.monotonic()
        if self._read_s is not None:
            num_slots = min(num_slots, int((begun_s - self._read_s) // self._slot_s) + 3)
        history = await self._deployment.history(num_slots, self._slot_s)
        self._read_s = begun_s
        self._slots.update({slot.number: slot for slot in history.slots})
        last = history.slots[-1].number
        for number in [n for n in self._slots if not last - self._num_slots < n <= last]:
            del self._slots[number]
        return History(history.now_s, [self._slots[number] for number in sorted(self._slots)])


class Histories:
    """Returns the slots with their ids, oldest first. Every call may raise TransportError."""

    def __init__(self, deployment: Deployment) -> None:
        self._hour = HistoryRing(deployment, HISTORY_SLOT_S, HISTORY_SLOTS)
        self._day = HistoryRing(deployment, DAY_SLOT_S, DAY_SLOTS)

    async def hour(self) -> list[Row]:
        history = await self._hour.read()
        return _rows(history.slots, HISTORY_SLOT_S, history.now_s)

    async def day(self) -> list[Row]:
        """Returns the day. A slot that is not over, or not folded yet, is made from its parts."""
        hour, day = await self._hour.read(), await self._day.read()
        slots = {slot.number: slot for slot in day.slots}
        for number, parts in groupby(hour.slots, lambda slot: slot.number // FOLDED):
            if number in slots and slots[number].accepted is None:
                slots[number] = folded(number, list(parts))
        return _rows([slots[number] for number in sorted(slots)], DAY_SLOT_S, day.now_s)


def folded(number: int, parts: Sequence[HistorySlot]) -> HistorySlot:
    """Returns the slot of the day that these slots, oldest first, make."""

    def known(name: str) -> list[int]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    ttft: dict[int, int] = {}
    for part in parts:
        for bucket, jobs in part.ttft.items():
            ttft[bucket] = ttft.get(bucket, 0) + jobs
    values: dict[str, Any] = {name: max(known(name), default=None) for name in _MOST}
    values |= {name: found[-1] if (found := known(name)) else None for name in _LAST}
    values |= {name: sum(known(name)) if known(name) else None for name in _SUMS}
    return HistorySlot(number, ttft=ttft, **values)


def _rows(slots: Iterable[HistorySlot], slot_s: int, now_s: float) -> list[Row]:
    found: list[Row] = []
    before: HistorySlot | None = None
    for slot in slots:
        end_s = min((slot.number + 1) * slot_s, now_s)
        found.append((str(slot.number), _row(slot, before, slot_s, end_s)))
        before = slot if slot.accepted is not None else before
    return found


def _row(
    slot: HistorySlot, before: HistorySlot | None, slot_s: int, end_s: float
) -> dict[str, Any]:
    is_known = slot.accepted is not None
    span_s = max(end_s - slot.number * slot_s, MIN_SPAN_S)
    since_s = span_s if before is None else max(end_s - (before.number + 1) * slot_s, MIN_SPAN_S)

    def added(name: str) -> int | None:
        """Returns what came to a total. Less than before: the server has lost its totals."""
        now, was = getattr(slot, name), getattr(before, name, None)
        return None if now is None or was is None else max(0, now - was)

    def per_s(amount: int | None, seconds: float) -> float | None:
        return None if amount is None else round(amount / seconds, 2)

    def counted(name: str) -> int | None:
        """Returns a count of this slot: none is 0, if anything looked."""
        return getattr(slot, name) or 0 if is_known else None

    return {
        "at": slot.number * slot_s,
        "queued": slot.queued,
        "running": slot.running,
        "queue_age_s": slot.queue_age_s,
        "requests_per_s": per_s(added("accepted"), since_s),
        "tokens_in_per_s": per_s(counted("tokens_in"), span_s),
        "tokens_out_per_s": per_s(counted("tokens_out"), span_s),
        "ttft_p50_ms": ttft_quantile(slot.ttft, 0.5),
        "ttft_p95_ms": ttft_quantile(slot.ttft, 0.95),
        "kv": None if slot.kv_permille is None else slot.kv_permille / 1000,
        "failed": added("failed"),
        "expired": added("expired"),
        "unavailable": counted("unavailable"),
        "errors": counted("errors"),
        "store_used": slot.store_used,
        "store_limit": slot.store_limit,
    }


def ttft_quantile(buckets: Mapping[int, int], quantile: float) -> int | None:
    """Returns milliseconds, within 5 %; None: there was no first token."""
    total, seen = sum(buckets.values()), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= quantile * total:
            return round(2 ** ((bucket + 0.5) / TTFT_PER_OCTAVE))
    return None

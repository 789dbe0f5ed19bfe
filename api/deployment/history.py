"""HistoryRing: the last hour in slots of half a minute, as sparklines show it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from shared.transport.ports.deployment import (
    HISTORY_SLOT_S,
    HISTORY_SLOTS,
    TTFT_PER_OCTAVE,
    Deployment,
    HistorySlot,
)

MIN_SPAN_S = 1.0  # of the slot that is not over, for a rate


class HistoryRing:
    """Reads a slot once it is over for the last time, and then keeps it."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._slots: dict[int, HistorySlot] = {}
        self._read_s: float | None = None

    async def rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the slots with their ids, oldest first. Raises TransportError."""
        num_slots = HISTORY_SLOTS
        begun_s = time.monotonic()
        if self._read_s is not None:
            num_slots = min(num_slots, int((begun_s - self._read_s) // HISTORY_SLOT_S) + 3)
        history = await self._deployment.history(num_slots)
        self._read_s = begun_s
        self._slots.update({slot.number: slot for slot in history.slots})
        last = history.slots[-1].number
        for number in [n for n in self._slots if not last - HISTORY_SLOTS < n <= last]:
            del self._slots[number]
        found: list[tuple[str, dict[str, Any]]] = []
        before: HistorySlot | None = None
        for number in sorted(self._slots):
            slot = self._slots[number]
            end_s = min((number + 1) * HISTORY_SLOT_S, history.now_s)
            found.append((str(number), _row(slot, before, end_s)))
            before = slot if slot.accepted is not None else before
        return found


def _row(slot: HistorySlot, before: HistorySlot | None, end_s: float) -> dict[str, Any]:
    per_s = None
    if before is not None and None not in (slot.accepted, before.accepted):
        span_s = max(end_s - (before.number + 1) * HISTORY_SLOT_S, MIN_SPAN_S)
        # Less than before: the server has lost its totals.
        per_s = round(max(0, (slot.accepted or 0) - (before.accepted or 0)) / span_s, 2)
    return {
        "at": slot.number * HISTORY_SLOT_S,
        "queued": slot.queued,
        "running": slot.running,
        "requests_per_s": per_s,
        "ttft_p50_ms": ttft_quantile(slot.ttft, 0.5),
        "ttft_p95_ms": ttft_quantile(slot.ttft, 0.95),
    }


def ttft_quantile(buckets: Mapping[int, int], quantile: float) -> int | None:
    """Returns milliseconds, within 5 %; None: there was no first token."""
    total, seen = sum(buckets.values()), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= quantile * total:
            return round(2 ** ((bucket + 0.5) / TTFT_PER_OCTAVE))
    return None

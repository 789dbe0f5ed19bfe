"""Accounts: the processor time that tenants use, and their refused requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from api.http.shares import paying_tenant
from shared.transport.ports.deployment import Spent


class Accounts:
    """Counts them. Safe on several threads.

    Counted here until `drain` hands it to the store, which adds up what all frontends and workers
    report. "" is the service itself, or all clients of one without keys.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[str, tuple[int, int]] = {}
        self._reported_us: Counter[str] = Counter()
        self._seen: dict[str, tuple[int, int]] | None = None  # totals, and what of them is others'

    def charge(self, tenant: str, cpu_s: float) -> None:
        self._add(tenant, round(cpu_s * 1e6), 0)

    def refuse(self) -> None:
        """Counts a request of the running task that was refused."""
        self._add(paying_tenant(), 0, 1)

    def drain(self) -> list[Spent]:
        """Returns what came since the last call."""
        with self._lock:
            spent, self._spent = self._spent, {}
        return [Spent(tenant, *amounts) for tenant, amounts in spent.items()]

    def reported(self, spent: Sequence[Spent]) -> None:
        """Notes that the store has it."""
        self._reported_us.update({tenant: cpu_us for tenant, cpu_us, _ in spent})

    def give_back(self, spent: Sequence[Spent]) -> None:
        """Counts what the store may not have once more, for the next report."""
        for one in spent:
            self._add(*one)

    def elsewhere(self, cpu_us: Mapping[str, int]) -> dict[str, float]:
        """Returns the seconds that other processes have charged since the last call, by tenant.
        `cpu_us`: the totals of the store, in microseconds."""
        seen, self._seen = self._seen, {}
        more = {}
        for tenant, total in cpu_us.items():
            before, known = (0, 0) if seen is None else seen.get(tenant, (0, 0))
            if total < before:  # the store has lost its totals
                self._reported_us[tenant], known = total, 0
            others = max(known, total - self._reported_us[tenant])  # a total may be an older one
            self._seen[tenant] = total, others
            if seen is not None and others > known:
                more[tenant] = (others - known) / 1e6
        for lost in (seen or {}).keys() - cpu_us.keys():  # of the store: counted from nothing again
            self._reported_us.pop(lost, None)
        return more

    def _add(self, tenant: str, cpu_us: int, refused: int) -> None:
        with self._lock:
            had_us, had = self._spent.get(tenant, (0, 0))
            self._spent[tenant] = had_us + cpu_us, had + refused

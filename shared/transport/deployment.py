"""Deployment over Redis."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from shared.keys import Keys
from shared.redis.connections import Connections
from shared.transport.failures import translated
from shared.transport.ports.deployment import (
    HISTORY_SLOT_S,
    NO_SAMPLE,
    REPORT_LIFE_MS,
    History,
    HistorySlot,
    ProcessKind,
    ProcessReport,
    Sample,
    Spent,
    TenantLoad,
)
from shared.transport.scripts import Argument, Scripts

TENANT_PAGE = 200  # read in one call

Hash = Mapping[bytes, bytes]


class RedisDeployment:
    """Implements Deployment."""

    def __init__(self, keys: Keys, connections: Connections, scripts: Scripts) -> None:
        self._keys = keys
        self._connections = connections
        self._redis = connections.commands
        self._scripts = scripts

    async def report(
        self,
        kind: ProcessKind,
        process_id: str,
        stats: Mapping[str, str | int],
        spent: Sequence[Spent] = (),
        sample: Sample = NO_SAMPLE,
    ) -> None:
        words: list[Argument] = account_arguments(spent)
        for pairs in (sample.counts, sample.figures):
            words.append(len(pairs))
            words += itertools.chain.from_iterable(pairs.items())
        words += itertools.chain.from_iterable(stats.items())
        with translated("report"):
            await self._scripts.call(
                self._connections.scripts, "report", kind, process_id, REPORT_LIFE_MS, *words
            )

    async def reports(self, kind: ProcessKind, limit: int) -> Sequence[ProcessReport]:
        with translated("reports"):
            listed: Any = await self._redis.zrevrange(self._keys.reports(kind), 0, limit - 1)
            names = sorted(name.decode() for name in listed)
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            for name in names:
                pipe.hgetall(self._keys.report(kind, name))
            time, *hashes = await pipe.execute()
        now_s = _seconds(time)
        return [
            _report(name, fields, now_s)
            for name, fields in zip(names, hashes, strict=True)
            if fields
        ]

    async def tenants(self, names: Sequence[str]) -> Sequence[TenantLoad]:
        loads: list[TenantLoad] = []
        for at in range(0, len(names), TENANT_PAGE):
            page = names[at : at + TENANT_PAGE]
            with translated("tenants"):
                pipe = self._redis.pipeline(transaction=False)
                for name in page:
                    pipe.hmget(self._keys.tenant(name), "queued", "running", "queued_tokens")
                rows = await pipe.execute()
            loads += (
                TenantLoad(name, *(int(value or 0) for value in row))
                for name, row in zip(page, rows, strict=True)
            )
        return loads

    async def history(self, num_slots: int, slot_s: int = HISTORY_SLOT_S) -> History:
        keys = self._keys
        key = keys.history if slot_s == HISTORY_SLOT_S else keys.history_of_day
        with translated("history"):
            now_s = _seconds(await self._redis.time())
            last = int(now_s // slot_s)
            numbers = range(last - num_slots + 1, last + 1)
            pipe = self._redis.pipeline(transaction=False)
            for number in numbers:
                pipe.hgetall(key(number))
            rows = await pipe.execute()
        return History(now_s, [_slot(n, row) for n, row in zip(numbers, rows, strict=True)])


def account_arguments(spent: Sequence[Spent]) -> list[Argument]:
    """Returns the arguments of lua/lib/accounts.lua, after their number."""
    arguments: list[Argument] = [len(spent)]
    for one in spent:
        arguments += one
    return arguments


def _seconds(time: tuple[int, int]) -> float:
    """Converts the reply of TIME."""
    return int(time[0]) + int(time[1]) / 1e6


def _report(process_id: str, fields: Hash, now_s: float) -> ProcessReport:
    stats = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in fields.items()
    }
    age_s = max(0.0, now_s - int(stats.pop("report_ms", "0")) / 1000)
    return ProcessReport(process_id, age_s, stats)


def _slot(number: int, fields: Hash) -> HistorySlot:
    def whole(name: bytes) -> int | None:
        value = fields.get(name)
        return None if value is None else int(value)

    return HistorySlot(
        number,
        whole(b"queued"),
        whole(b"running"),
        whole(b"accepted"),
        whole(b"ended"),
        {
            int(name[1:]): int(jobs)
            for name, jobs in fields.items()
            if name[:1] == b"t" and name[1:].isdigit()
        },
        failed=whole(b"failed"),
        expired=whole(b"expired"),
        tokens_in=whole(b"in"),
        tokens_out=whole(b"out"),
        unavailable=whole(b"unavailable"),
        errors=whole(b"errors"),
        queue_age_s=whole(b"age_s"),
        kv_permille=whole(b"kv"),
        store_used=whole(b"used"),
        store_limit=whole(b"limit"),
    )

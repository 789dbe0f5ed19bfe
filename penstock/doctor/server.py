"""Checks of the Redis server: reachable, safe for a queue, its disk, memory and clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import redis.exceptions
from redis.asyncio import Redis

from penstock.doctor.finding import Finding, Level, fine, warning, wrong
from penstock.launcher.processes import reason_of
from shared.keys import Keys
from shared.redis.check import UnsafeServer, check_server, is_forbidden
from shared.redis.connections import Connections
from shared.redis.topology import WrongTopology
from shared.redis.url import UnsupportedUrl, redacted
from shared.transport.kept_prompts import RedisKeptPrompts, survey_prefixes
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.prompts import KeptPrompts

MAX_CLOCK_GAP_S = 2.0
SLOW_MS = 10.0
PINGS = 5
NEARLY_FULL = 0.9


async def check_redis(url: str, namespace: str, num_partitions: int = 1) -> list[Finding]:
    """Returns findings about the server at a URL, or about those of all partitions in a cluster;
    of what not all have it names the partitions."""
    numbers = range(num_partitions)
    found = await asyncio.gather(*(_check_partition(url, Keys(namespace, n)) for n in numbers))
    seen: dict[Finding, list[int]] = {}
    for number, findings in zip(numbers, found, strict=True):
        for finding in findings:
            seen.setdefault(finding, []).append(number)
    return [_of_partitions(finding, ns, num_partitions) for finding, ns in seen.items()]


def _of_partitions(finding: Finding, numbers: Sequence[int], num_partitions: int) -> Finding:
    if len(numbers) == num_partitions:
        return finding
    named = f"Partition{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    waits = " Its jobs wait, and no others do." if finding.level is Level.ERROR else ""
    return replace(finding, sentence=f"{named}: {finding.sentence}{waits}")


async def _check_partition(url: str, keys: Keys) -> list[Finding]:
    try:
        connections = Connections(url, keys.live)
    except UnsupportedUrl as error:
        return [wrong("redis", str(error))]
    if connections.is_fake:
        return [
            warning(
                "redis",
                "fake:// is an in-process server: nothing survives, no other process can join.",
            )
        ]
    try:
        if connections.primary is not None:
            await connections.primary.locate()
        found = await _findings(connections, redacted(url))
        return [*found, *await _prefixes(RedisKeptPrompts(keys, connections.commands))]
    except (UnsafeServer, WrongTopology) as error:
        return [wrong("redis", str(error))]
    except (redis.exceptions.RedisError, TransportError, OSError) as error:
        reason = reason_of(error)
        return [
            wrong(
                "redis",
                f"{redacted(url)} cannot be used: {reason}. PENSTOCK_REDIS_URL sets its address.",
            )
        ]
    finally:
        await connections.aclose()


async def _findings(connections: Connections, shown: str) -> list[Finding]:
    client = connections.commands
    warnings = await check_server(client, connections.kind)
    found = [warning("redis", sentence) for sentence in warnings]
    latency_ms = await _latency_ms(client)
    if latency_ms > SLOW_MS:
        found.append(
            warning("redis", f"It answers after {latency_ms:.0f} ms; each token waits for it.")
        )
    found += await _clock(client)
    try:
        info: Mapping[str, Any] = await client.info()
    except redis.exceptions.ResponseError as error:
        if not is_forbidden(error):
            raise
        return found
    found += _disk(info)
    found += _memory(info)
    found += await _sync(client, info)
    if not found:
        found.append(fine("redis", f"{shown} answers, and keeps what it accepted."))
    return found


async def _latency_ms(client: Redis) -> float:
    """Returns the milliseconds of the quickest of some answers: one may have waited for this
    process."""
    took_s = []
    for _ in range(PINGS):
        started_s = time.monotonic()
        await client.ping()
        took_s.append(time.monotonic() - started_s)
    return 1000 * min(took_s)


async def _clock(client: Redis) -> list[Finding]:
    before_s = time.time()
    seconds, microseconds = await client.time()
    gap_s = seconds + microseconds / 1e6 - (before_s + time.time()) / 2
    if abs(gap_s) <= MAX_CLOCK_GAP_S:
        return []
    ahead = "ahead of" if gap_s > 0 else "behind"
    return [
        warning(
            "clock",
            f"The clock of the Redis host is {abs(gap_s):.0f} s {ahead} this machine's: times of "
            "jobs will look wrong, and links with a token may end early. Synchronize both (NTP).",
        )
    ]


def _disk(info: Mapping[str, Any]) -> Iterator[Finding]:
    if info.get("aof_last_write_status", "ok") != "ok":
        yield wrong(
            "redis",
            "It cannot write its append-only file (aof_last_write_status): its disk is full or "
            "failed, and it refuses writes.",
        )
    if info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield warning(
            "redis",
            "It could not rewrite its append-only file, which then grows without end: look at its "
            "log, and at the space on its disk.",
        )
    if int(info.get("loading", 0)):
        yield warning("redis", "It is still loading its data.")


def _memory(info: Mapping[str, Any]) -> Iterator[Finding]:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    total = int(info.get("total_system_memory", 0))
    if limit and used >= NEARLY_FULL * limit:
        yield warning(
            "redis",
            f"It uses {used / 2**20:.0f} of {limit / 2**20:.0f} MB (maxmemory): when it is full, "
            "no job is accepted. Raise maxmemory, or lower PENSTOCK_MAX_QUEUED_JOBS.",
        )
    elif not limit and total and used >= NEARLY_FULL * total:
        yield warning(
            "redis",
            f"It uses {used / 2**20:.0f} of its machine's {total / 2**20:.0f} MB, without a limit: "
            "the system may kill it. Set it with: CONFIG SET maxmemory",
        )


async def _sync(client: Redis, info: Mapping[str, Any]) -> list[Finding]:
    if not int(info.get("aof_enabled", 0)):
        return []  # reported already
    try:
        policy = (await client.config_get("appendfsync")).get("appendfsync")
    except redis.exceptions.ResponseError:
        return []  # managed servers forbid CONFIG
    if policy != "no":
        return []
    return [
        warning(
            "redis",
            "appendfsync is no: a power failure loses what the system had not written, half a "
            "minute and more. Set it with: CONFIG SET appendfsync everysec",
        )
    ]


async def _prefixes(prompts: KeptPrompts) -> list[Finding]:
    """Says how many recent jobs computed again what an earlier job had computed."""
    seen = await survey_prefixes(prompts)
    num_again = seen.num_evicted + seen.num_changed
    if not seen.num_jobs:
        return []
    if not num_again:
        return [fine("prefixes", f"All {seen.num_jobs} recent multi-turn jobs were cached.")]
    causes = []
    if seen.num_evicted:
        causes.append(
            f"{seen.num_evicted} had the same tokens, which were evicted or computed by another "
            "worker"
        )
    example = None
    if seen.changed_at is not None:
        place, count, example = seen.changed_at
        causes.append(
            f"of {seen.num_changed} the prompt had changed, most often after {place} tokens "
            f"({count})"
        )
    else:
        example = seen.evicted
    return [
        warning(
            "prefixes",
            f"{num_again} of the last {seen.num_jobs} multi-turn jobs computed a prefix again: "
            f"{'; '.join(causes)}. Look at one with: penstock jobs show {example}",
        )
    ]

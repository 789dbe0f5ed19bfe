"""Is this a server that a queue can live on? Checked once at start."""

from __future__ import annotations

import re
import time
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from shared.keys import Keys
from shared.redis.failures import is_out_of_memory, translated
from shared.redis.url import ServerKind
from shared.transport.wire import SCHEMA_VERSION

MIN_VERSION = (7, 0)


class UnsafeServer(Exception):
    """The server would lose or corrupt jobs. The sentence says what to change."""


async def check_server(
    redis: Redis,
    keys: Keys,
    *,
    kind: ServerKind = ServerKind.SINGLE,
    meta: Redis | None = None,
) -> list[str]:
    """Sentences worth a warning. Raises UnsafeServer, or TransportError when it does not answer.

    What an access list forbids to ask is a warning, not a refusal. `meta` is who has `keys.meta`,
    where that is another server of a cluster.
    """
    with translated("check"):
        await redis.ping()
        try:
            info: dict[str, Any] = await redis.info()
        except ResponseError as error:
            if not _is_forbidden(error):
                raise
            info = {}
        forbidden = "INFO is forbidden: the server was not checked."
        warnings = _judge(info, kind) if info else [forbidden]
        try:
            await _check_schema(redis if meta is None else meta, keys)
        except ResponseError as error:
            if is_out_of_memory(error):
                warnings.append("The server is full (maxmemory): no job is accepted at the moment.")
            elif _is_forbidden(error):
                raise UnsafeServer(f"The server forbids what Penstock needs: {error}") from error
            else:
                raise
    return warnings


def _judge(info: dict[str, Any], kind: ServerKind = ServerKind.SINGLE) -> list[str]:
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):  # Redis' word, Valkey's
        raise UnsafeServer(
            "This is a sentinel and keeps no data; write "
            "redis+sentinel://host:26379,host:26379/mymaster/0."
        )
    version_text = str(info.get("redis_version", ""))
    version = tuple(int(part) for part in re.findall(r"\d+", version_text)[:2])
    if version < MIN_VERSION:
        raise UnsafeServer(f"Redis 7.0 or newer (or Valkey) is needed, this is {version_text}.")
    if info.get("role", "master") not in ("master", "primary"):
        raise UnsafeServer("The server is a read-only replica; give the primary's address.")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise UnsafeServer(
            f"maxmemory-policy is {policy}: the server may silently drop jobs. "
            "Set it with: CONFIG SET maxmemory-policy noeviction"
        )
    warnings = []
    if not int(info.get("aof_enabled", 0)):
        warnings.append(
            "The append-only file is off: accepted jobs are lost when the server restarts. "
            "Set it with: CONFIG SET appendonly yes"
        )
    if int(info.get("cluster_enabled", 0)) and kind is ServerKind.SINGLE:
        warnings.append(
            "The server is in cluster mode: redirections are not followed, every key must live on "
            "this node. To follow them write redis+cluster://."
        )
    # INFO counts the good replicas only where some are demanded.
    if kind is ServerKind.SENTINEL and "min_slaves_good_slaves" not in info:
        warnings.append(
            "min-replicas-to-write is 0: a primary that was cut off goes on accepting jobs which "
            "the failover then loses. Set it with: CONFIG SET min-replicas-to-write 1"
        )
    return warnings


async def _check_schema(redis: Redis, keys: Keys) -> None:
    await redis.hsetnx(keys.meta, "schema", str(SCHEMA_VERSION))
    await redis.hsetnx(keys.meta, "created", str(int(time.time())))
    found = await redis.hget(keys.meta, "schema")
    text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
    if not text.isdigit() or int(text) > SCHEMA_VERSION:
        raise UnsafeServer(
            f"The data under '{keys.namespace}:' has schema {text[:20]}, this release knows up to "
            f"{SCHEMA_VERSION}; run a newer release or another namespace."
        )


def _is_forbidden(error: ResponseError) -> bool:
    return isinstance(error, NoPermissionError) or "NOPERM" in str(error)

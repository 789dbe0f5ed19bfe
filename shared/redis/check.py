"""Checks at start whether a server can keep a queue: version, role, eviction, durability."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from shared.redis.url import ServerKind

MIN_VERSION = (7, 0)


class UnsafeServer(Exception):
    """The server would lose or corrupt jobs. The message names the setting to change."""


async def check_server(redis: Redis, kind: ServerKind = ServerKind.SINGLE) -> list[str]:
    """Returns warnings, as sentences. Raises UnsafeServer, and RedisError or OSError if the
    server cannot be reached.

    An INFO that an access list forbids is a warning.
    """
    await redis.ping()
    try:
        info: dict[str, Any] = await redis.info()
    except ResponseError as error:
        if not is_forbidden(error):
            raise
        return ["INFO is forbidden: the server was not checked."]
    return judge(info, kind)


def judge(info: Mapping[str, Any], kind: ServerKind = ServerKind.SINGLE) -> list[str]:
    """Returns warnings about a server by its INFO. Raises UnsafeServer."""
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):  # Redis' name, Valkey's
        raise UnsafeServer(
            "This is a sentinel, which keeps no data; use "
            "redis+sentinel://host:26379,host:26379/mymaster/0."
        )
    version_text = str(info.get("redis_version", ""))
    version = tuple(int(part) for part in re.findall(r"\d+", version_text)[:2])
    if version < MIN_VERSION:
        raise UnsafeServer(f"Penstock needs Redis 7.0 or newer, or Valkey; this is {version_text}.")
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
            "min-replicas-to-write is 0: a primary that was cut off still accepts jobs, which "
            "the failover then loses. Set it with: CONFIG SET min-replicas-to-write 1"
        )
    return warnings


def is_forbidden(error: ResponseError) -> bool:
    """Returns whether the user's access list forbids the command."""
    return isinstance(error, NoPermissionError) or "NOPERM" in str(error)

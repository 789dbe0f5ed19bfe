"""The primary, found again after every failover, and connections to it.

All keys are in one cluster slot, so with a cluster as with sentinels exactly one server takes the
writes. It is looked up for every new connection, by a search that starts after the request for it,
and accepted once that server confirms its role.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.redis.redis_compat import TcpConnection, TlsConnection
from shared.redis.url import Address

log = logging.getLogger(__name__)

SEARCH_TIMEOUT_S = 3.0
MAX_LEARNED = 64

_BROKEN = (RedisError, OSError, EOFError)


class PrimaryUnknown(RedisConnectionError):
    """No server takes the writes now. The sentence holds neither address nor password."""


class WrongTopology(RedisError):
    """A server of another kind than the URL names: waiting does not help."""


@dataclass(frozen=True, slots=True)
class Found:
    """The confirmed primary, and further servers that the next search may query."""

    address: Address
    others: Sequence[Address] = ()


class Finder(Protocol):
    """Queries one server for the primary."""

    async def find(self, seed: Address) -> Found:
        """Raises PrimaryUnknown, WrongTopology, or whatever kept the servers from answering."""
        ...


class PrimaryResolver:
    """Finds the primary. Safe for any number of tasks: concurrent calls share one search."""

    def __init__(self, seeds: Sequence[Address], finder: Finder) -> None:
        self._given = tuple(seeds)
        self._seeds = list(seeds)  # the one that knew it last is at the front
        self._finder = finder
        self._searching = asyncio.Lock()
        self._num_begun = 0
        self._num_answered = 0  # the number of the search that gave the outcome
        self._outcome: Found | RedisError = PrimaryUnknown("no server was queried yet")
        self.latest: Address | None = None  # where it was found last

    async def locate(self) -> Address:
        """Returns the primary's address as of now. Raises PrimaryUnknown or WrongTopology."""
        begun_before = self._num_begun
        async with self._searching:
            if (
                self._num_answered <= begun_before
            ):  # a search that started before this call may be outdated
                self._num_begun += 1
                self._outcome = await self._search()
                self._num_answered = self._num_begun
            outcome = self._outcome
        if isinstance(outcome, Found):
            return outcome.address
        raise type(outcome)(*outcome.args)

    async def _search(self) -> Found | RedisError:
        trouble: RedisError = PrimaryUnknown("no server answered in time")
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                for seed in tuple(self._seeds):
                    self._seeds.remove(seed)  # first, so that a silent one comes last next time
                    self._seeds.append(seed)
                    try:
                        found = await self._finder.find(seed)
                    except (PrimaryUnknown, WrongTopology) as error:
                        trouble = error
                    except _BROKEN as error:
                        if not isinstance(trouble, WrongTopology):
                            trouble = PrimaryUnknown(f"no server answered ({type(error).__name__})")
                    else:
                        self._remember(seed, found)
                        return found
        except TimeoutError:
            pass
        return trouble

    def _remember(self, seed: Address, found: Found) -> None:
        order = [seed, *self._given, found.address, *found.others]
        self._seeds = list(dict.fromkeys(order))[: len(self._given) + MAX_LEARNED]
        if self.latest not in (None, found.address):
            host, port = found.address
            log.warning("the Redis primary has changed", extra={"primary": f"{host}:{port}"})
        self.latest = found.address


MAX_HOPS = 5

NewConnection = Callable[[Address], AbstractConnection]


class SentinelFinder:
    """Queries a sentinel for the primary, which must confirm its role."""

    def __init__(
        self, service: str, new_sentinel: NewConnection, new_server: NewConnection
    ) -> None:
        self._service = service
        self._new_sentinel = new_sentinel
        self._new_server = new_server

    async def find(self, seed: Address) -> Found:
        try:
            reply = await _query(
                self._new_sentinel(seed), "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service
            )
        except ResponseError as error:
            if "unknown command" in str(error).lower():
                raise WrongTopology("The server at redis+sentinel:// is not a sentinel.") from error
            raise
        if reply is None:
            raise PrimaryUnknown(f"the sentinels watch no primary named {self._service!r}")
        address = _text(reply[0]), int(reply[1])
        try:
            role = await _query(self._new_server(address), "ROLE")
        except NoPermissionError:
            return Found(address)  # forbidden by its access list: a replica refuses the first write
        if role[0] != b"master":
            raise PrimaryUnknown("the server that the sentinels name is a replica")
        return Found(address)


class ClusterFinder:
    """Queries a node for the owner of the key's slot, which must confirm it and see a majority."""

    def __init__(self, key: str, new_node: NewConnection) -> None:
        self._slot = key_slot(key.encode())
        self._new_node = new_node

    async def find(self, seed: Address) -> Found:
        address = seed
        for _ in range(MAX_HOPS):
            try:
                ranges = await _query(self._new_node(address), "CLUSTER", "SLOTS")
            except ResponseError as error:
                if "cluster support disabled" in str(error):
                    raise WrongTopology(
                        "The server at redis+cluster:// is not in cluster mode."
                    ) from error
                raise
            owner, nodes = _owner(ranges, self._slot, address[0])
            if owner is None:
                raise PrimaryUnknown(f"no node of the cluster serves slot {self._slot}")
            if owner == address:
                await self._check_majority(address)
                return Found(address, nodes)
            address = owner
        raise PrimaryUnknown(f"the nodes of the cluster disagree on who serves slot {self._slot}")

    async def _check_majority(self, address: Address) -> None:
        try:
            info = await _query(self._new_node(address), "CLUSTER", "INFO")
        except NoPermissionError:
            return
        if b"cluster_state:ok" not in info:
            raise PrimaryUnknown("the cluster is down")


def _owner(ranges: Any, slot: int, queried_host: str) -> tuple[Address | None, list[Address]]:
    """Returns the primary of the slot and all nodes, from a reply to CLUSTER SLOTS."""
    owner: Address | None = None
    nodes: list[Address] = []
    for first, last, *members in ranges:
        # A node that does not know its own address, or must not announce it, gives none.
        addresses = [(_text(host or b"") or queried_host, int(port)) for host, port, *_ in members]
        nodes += addresses
        if first <= slot <= last:
            owner = addresses[0]
    return owner, list(dict.fromkeys(nodes))


async def _query(connection: AbstractConnection, *command: str) -> Any:
    """Sends one command over a new connection; returns the reply. Raises RedisError."""
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_command(*command)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# MovedError is an AskError, MasterDownError a ClusterDownError. ASK and TRYAGAIN: the slot is being
# moved key by key; nothing of it can be used before all of it has arrived.
_ELSEWHERE = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)


class PrimaryConnection(TcpConnection):
    """Looks the primary up each time it connects, and leaves a former one.

    A server that is no primary (any more), or a primary that another connection has found
    elsewhere, is a ConnectionError: retried where the profile retries, then at the new primary.
    """

    def __init__(self, *, resolver: PrimaryResolver, **options: Any) -> None:
        super().__init__(**options)
        self._resolver = resolver

    async def locate(self) -> None:
        self.host, self.port = await self._resolver.locate()

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self.is_connected and self._resolver.latest != (self.host, self.port):
            await self.disconnect(nowait=True)
            raise RedisConnectionError("the primary has changed")
        await super().send_packed_command(command, check_health)

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except ResponseError as error:
            # A primary without its replicas may have been replaced unnoticed.
            if not isinstance(error, _ELSEWHERE) and not str(error).startswith("NOREPLICAS"):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"not the primary ({type(error).__name__})") from error


class PrimaryTlsConnection(PrimaryConnection, TlsConnection):
    """The same over TLS."""

"""Home: the server that takes the writes of our partition, found again after every failover.

All keys of a partition live in one cluster slot, so in a cluster as behind sentinels there is
always exactly one server to talk to. Who that is, is asked anew for every connection that is
opened: the answer is never older than the question, and it is only believed once that server
confirms it.
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

from shared.redis.server_connection import TcpConnection, TlsConnection
from shared.redis.url import Address

log = logging.getLogger(__name__)

SEARCH_TIMEOUT_S = 3.0
MAX_LEARNED = 64

_BROKEN = (RedisError, OSError, EOFError)


class HomeUnknown(RedisConnectionError):
    """Nobody takes our writes at the moment. The sentence holds neither address nor password."""


class WrongTopology(RedisError):
    """What answered is not what the URL says it is: waiting does not help."""


@dataclass(frozen=True, slots=True)
class Found:
    """The home that a finder confirmed, and further servers that could be asked next time."""

    address: Address
    others: Sequence[Address] = ()


class Finder(Protocol):
    """Asks one server who the home is."""

    async def find(self, seed: Address) -> Found:
        """Raises HomeUnknown, WrongTopology, or whatever kept the servers from answering."""
        ...


class Home:
    """Safe for any number of tasks: those that ask at the same time share one search."""

    def __init__(self, seeds: Sequence[Address], finder: Finder) -> None:
        self._given = tuple(seeds)
        self._seeds = list(seeds)  # the one that knew it last is at the front
        self._finder = finder
        self._searching = asyncio.Lock()
        self._num_begun = 0
        self._num_answered = 0  # the number of the search that gave the outcome
        self._outcome: Found | RedisError = HomeUnknown("nobody was asked yet")
        self.latest: Address | None = None  # where it was found last

    async def locate(self) -> Address:
        """The home's address, as of now. Raises HomeUnknown or WrongTopology."""
        begun_before = self._num_begun
        async with self._searching:
            if self._num_answered <= begun_before:  # only what began after we asked is good enough
                self._num_begun += 1
                self._outcome = await self._search()
                self._num_answered = self._num_begun
            outcome = self._outcome
        if isinstance(outcome, Found):
            return outcome.address
        raise type(outcome)(*outcome.args)

    async def _search(self) -> Found | RedisError:
        trouble: RedisError = HomeUnknown("no server answered in time")
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                for seed in tuple(self._seeds):
                    self._seeds.remove(seed)  # first, so that a silent one is not asked first again
                    self._seeds.append(seed)
                    try:
                        found = await self._finder.find(seed)
                    except (HomeUnknown, WrongTopology) as error:
                        trouble = error
                    except _BROKEN as error:
                        if not isinstance(trouble, WrongTopology):
                            trouble = HomeUnknown(f"no server answered ({type(error).__name__})")
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
            log.warning("redis has another home", extra={"home": f"{host}:{port}"})
        self.latest = found.address


# How a home is found: by asking sentinels, or by asking the nodes of a cluster.

MAX_HOPS = 5

NewConnection = Callable[[Address], AbstractConnection]


class SentinelFinder:
    """A sentinel names the primary; the primary must say that it is one."""

    def __init__(
        self, service: str, new_sentinel: NewConnection, new_server: NewConnection
    ) -> None:
        self._service = service
        self._new_sentinel = new_sentinel
        self._new_server = new_server

    async def find(self, seed: Address) -> Found:
        try:
            reply = await _ask(
                self._new_sentinel(seed), "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service
            )
        except ResponseError as error:
            if "unknown command" in str(error).lower():
                raise WrongTopology(
                    "A server that is no sentinel was given as redis+sentinel://."
                ) from error
            raise
        if reply is None:
            raise HomeUnknown(f"the sentinels watch no primary named {self._service!r}")
        address = _text(reply[0]), int(reply[1])
        try:
            role = await _ask(self._new_server(address), "ROLE")
        except NoPermissionError:
            return Found(address)  # its access list hides it: a replica refuses the first write
        if role[0] != b"master":
            raise HomeUnknown("the server that the sentinels name is a replica")
        return Found(address)


class ClusterFinder:
    """A node names the owner of the key's slot; the owner must say so too and be in a majority."""

    def __init__(self, key: str, new_node: NewConnection) -> None:
        self._slot = key_slot(key.encode())
        self._new_node = new_node

    async def find(self, seed: Address) -> Found:
        address = seed
        for _ in range(MAX_HOPS):
            try:
                ranges = await _ask(self._new_node(address), "CLUSTER", "SLOTS")
            except ResponseError as error:
                if "cluster support disabled" in str(error):
                    raise WrongTopology(
                        "A server that is not in cluster mode was given as redis+cluster://."
                    ) from error
                raise
            owner, nodes = _owner(ranges, self._slot, address[0])
            if owner is None:
                raise HomeUnknown(f"no node of the cluster serves slot {self._slot}")
            if owner == address:
                await self._check_majority(address)
                return Found(address, nodes)
            address = owner
        raise HomeUnknown(f"the nodes of the cluster disagree on who serves slot {self._slot}")

    async def _check_majority(self, address: Address) -> None:
        try:
            info = await _ask(self._new_node(address), "CLUSTER", "INFO")
        except NoPermissionError:
            return
        if b"cluster_state:ok" not in info:
            raise HomeUnknown("the cluster is down")


def _owner(ranges: Any, slot: int, asked_host: str) -> tuple[Address | None, list[Address]]:
    """The primary of the slot and all nodes, from a reply to CLUSTER SLOTS."""
    owner: Address | None = None
    nodes: list[Address] = []
    for first, last, *members in ranges:
        # A node that does not know its own address, or must not tell it, gives none.
        addresses = [(_text(host or b"") or asked_host, int(port)) for host, port, *_ in members]
        nodes += addresses
        if first <= slot <= last:
            owner = addresses[0]
    return owner, list(dict.fromkeys(nodes))


async def _ask(connection: AbstractConnection, *command: str) -> Any:
    """One question over a connection of its own, which is closed again."""
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_command(*command)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# A connection that leads to the partition's home, wherever that is when it connects.

# MovedError is an AskError, MasterDownError a ClusterDownError. ASK and TRYAGAIN: the slot is being
# moved key by key; nothing of it can be used before all of it has arrived.
_ELSEWHERE = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)


class HomedConnection(TcpConnection):
    """Looks for its home each time it connects, and notices when it is at a former one.

    A server that says it is not (any more) the one, or a home that another connection has found
    elsewhere, is a ConnectionError: retried where the profile retries, then at the new home.
    """

    def __init__(self, *, home: Home, **options: Any) -> None:
        super().__init__(**options)
        self._home = home

    async def _connect(self) -> None:
        self.host, self.port = await self._home.locate()
        await super()._connect()  # type: ignore[no-untyped-call]

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self.is_connected and self._home.latest != (self.host, self.port):
            await self.disconnect(nowait=True)
            raise RedisConnectionError("the partition's home has moved")
        await super().send_packed_command(command, check_health)

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except ResponseError as error:
            # A primary that lost its replicas may have been replaced without knowing it.
            if not isinstance(error, _ELSEWHERE) and not str(error).startswith("NOREPLICAS"):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"not at home ({type(error).__name__})") from error


class HomedSSLConnection(HomedConnection, TlsConnection):
    """The same over TLS."""

"""How a home is found: by asking sentinels, or by asking the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import NoPermissionError, ResponseError

from shared.transport.home import Found, HomeUnknown, WrongTopology
from shared.transport.server_url import Address

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

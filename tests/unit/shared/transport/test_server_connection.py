"""What the connections do otherwise than redis-py's, and what of its interface they rely on."""

from __future__ import annotations

import asyncio
import inspect
from unittest.mock import AsyncMock, Mock

import pytest
from redis.asyncio.connection import Connection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError

from shared.messages import JobState
from shared.redis.redis_compat import TcpConnection


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("XGROUP CREATE", "queue", b"w", 0),
        (b"CLIENT LIST", "TYPE", "normal"),
        ("EVALSHA", "0" * 40, 1, "key", "\u00e9|\U0001f600", b"\x00\r\n\xff", -7, 2**63, 1.5, ""),
        ("SET", "state", JobState.FAILED),
        ("SET", "long", b"x" * 100_000, "short"),
    ],
)
def test_a_command_is_packed_as_the_library_packs_it(command: tuple[object, ...]) -> None:
    packed = b"".join(TcpConnection().pack_command(*command))
    assert packed == b"".join(Connection().pack_command(*command))


def test_what_is_no_argument_is_refused_as_the_library_refuses_it() -> None:
    for value in (None, ["a"]):
        with pytest.raises(DataError):
            TcpConnection().pack_command("SET", "key", value)


async def test_the_library_sends_what_the_connections_pack() -> None:
    connection = TcpConnection()
    connection.pack_command = Mock(return_value=[b"packed"])  # type: ignore[method-assign]
    connection._reader = Mock(spec=asyncio.StreamReader)
    connection._writer = Mock(spec=asyncio.StreamWriter, drain=AsyncMock())
    await connection.send_command("PING", check_health=False)
    connection._writer.writelines.assert_called_once_with([b"packed"])
    assert connection.pack_commands([("PING",), ("PING",)]) == [b"packedpacked"]
    await connection.disconnect(nowait=True)


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (Connection, "_connect", ["self"]),
        (Connection, "can_read", ["self"]),
        (Connection, "connect", ["self"]),
        (Connection, "disconnect", ["self", "nowait"]),
        (Connection, "send_packed_command", ["self", "command", "check_health"]),
        (Connection, "read_response", ["self", "disable_decoding", "timeout"]),
        (ConnectionPool, "make_connection", ["self"]),
    ],
)
def test_the_library_has_what_the_connections_override_or_use(
    owner: type, name: str, parameters: list[str]
) -> None:
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found[: len(parameters)] == parameters


@pytest.mark.parametrize(
    ("words", "raised"),
    [
        (
            "unable to perform operation on <TCPTransport closed=True reading=False 0x55>; "
            "the handler is closed",
            RedisConnectionError,
        ),
        ("Event loop is closed", RuntimeError),
        ("no running event loop", RuntimeError),
        ("Cannot call write() after write_eof()", RuntimeError),
    ],
)
async def test_uvloops_closed_transport_is_a_lost_connection_and_no_other_runtime_error(
    words: str, raised: type[Exception]
) -> None:
    connection = TcpConnection()
    connection._reader = Mock(spec=asyncio.StreamReader)
    connection._writer = Mock(spec=asyncio.StreamWriter, drain=AsyncMock())
    connection._writer.writelines.side_effect = RuntimeError(words)
    with pytest.raises(raised):
        await connection.send_packed_command([b"PING"])
    assert not connection.is_connected

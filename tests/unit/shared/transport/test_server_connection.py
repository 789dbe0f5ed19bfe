"""What the connections do otherwise than the client library's."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError

from shared.messages import JobState
from shared.redis.server_connection import TcpConnection


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

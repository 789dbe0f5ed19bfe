from __future__ import annotations

import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import DataError

from shared.messages import JobState
from shared.transport.packing import PackingConnection


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
    packed = b"".join(PackingConnection().pack_command(*command))
    assert packed == b"".join(Connection().pack_command(*command))


def test_what_is_no_argument_is_refused_as_the_library_refuses_it() -> None:
    for value in (None, ["a"]):
        with pytest.raises(DataError):
            PackingConnection().pack_command("SET", "key", value)

"""Which servers are refused, and what is only worth a warning."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from penstock.launcher.redis_server import PrivateServer
from shared.redis.check import UnsafeServer, judge
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.jobs import TransportError

SOUND = {"redis_version": "7.2.4", "role": "master", "maxmemory_policy": "noeviction"}


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    server = PrivateServer()
    yield server.start()
    server.stop()


@pytest.fixture
async def own(own_server: str) -> AsyncIterator[RedisTransport]:
    opened = await open_transport(own_server)
    yield opened
    redis: Any = opened.connections.commands
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("appendonly", "yes")
    await redis.replicaof("NO", "ONE")
    await redis.delete(opened.keys.meta)
    await opened.aclose()


async def test_our_private_server_is_sound(own: RedisTransport) -> None:
    assert await own.check() == []
    meta = await own.connections.commands.hgetall(own.keys.meta)
    assert meta[b"schema"] == b"1"


async def test_eviction_is_refused(own: RedisTransport) -> None:
    await own.connections.commands.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsafeServer, match="noeviction"):
        await own.check()


async def test_no_append_only_file_is_a_warning(own: RedisTransport) -> None:
    await own.connections.commands.config_set("appendonly", "no")
    (warning,) = await own.check()
    assert "append-only" in warning


async def test_a_replica_is_refused(own: RedisTransport) -> None:
    redis: Any = own.connections.commands
    await redis.replicaof("127.0.0.1", "1")
    with pytest.raises(UnsafeServer, match="replica"):
        await own.check()


async def test_a_newer_schema_is_refused(own: RedisTransport) -> None:
    await own.connections.commands.hset(own.keys.meta, "schema", "2")
    with pytest.raises(UnsafeServer, match="schema 2"):
        await own.check()


async def test_a_forbidden_info_is_a_warning(own: RedisTransport, own_server: str) -> None:
    redis: Any = own.connections.commands
    await redis.execute_command(
        "ACL", "SETUSER", "plain", "on", ">word", "~*", "&*", "+@all", "-info", "-config"
    )
    plain = await open_transport(own_server.replace("unix://", "unix://plain:word@"))
    assert await plain.check() == ["INFO is forbidden: the server was not checked."]
    assert "word" not in plain.url
    await plain.aclose()


async def test_a_wrong_password_is_an_error_without_it(
    own: RedisTransport, own_server: str
) -> None:
    wrong = await open_transport(own_server.replace("unix://", "unix://plain:hunter2@"))
    with pytest.raises(TransportError) as caught:
        await wrong.check()
    assert "hunter2" not in str(caught.value)
    await wrong.aclose()


@pytest.mark.parametrize("version", ["6.2.14", "2.8", "", "unknown"])
def test_older_servers_are_refused(version: str) -> None:
    with pytest.raises(UnsafeServer, match=r"7\.0"):
        judge(SOUND | {"redis_version": version})


def test_cluster_mode_is_a_warning() -> None:
    warnings = judge(SOUND | {"aof_enabled": 1, "cluster_enabled": 1})
    assert any("cluster" in warning for warning in warnings)


async def test_the_fake_server_warns_that_nothing_survives() -> None:
    fake = await open_transport("fake://check")
    (warning,) = await fake.check()
    assert "nothing survives" in warning
    await fake.aclose()


async def test_an_absent_server_is_a_transport_error(tmp_path: Any) -> None:
    away = await open_transport(f"unix://{tmp_path}/none.sock")
    with pytest.raises(TransportError):
        await away.check()
    await away.aclose()

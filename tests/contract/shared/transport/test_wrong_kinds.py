"""A URL of one kind for servers of another is refused in words, and so are wrong passwords."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.launcher.redis_server import inspect_command
from shared.redis.check import UnsafeServer
from shared.redis.cli import main as inspect
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.jobs import TransportError
from tests.support.redis_topologies import SERVICE, SentinelSetup


@pytest.fixture(scope="module")
def sentinels() -> Iterator[SentinelSetup]:
    with SentinelSetup() as setup:
        yield setup


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisTransport]:
    transport = await open_transport(url)
    try:
        yield transport
    finally:
        await transport.aclose()


async def test_a_sentinels_address_is_not_a_servers(sentinels: SentinelSetup) -> None:
    async with opened(f"redis://127.0.0.1:{sentinels.sentinels[0].port}") as transport:
        with pytest.raises(UnsafeServer, match=r"redis\+sentinel://"):
            await transport.check()


async def test_a_replicas_address_is_refused(sentinels: SentinelSetup) -> None:
    async with opened(f"redis://127.0.0.1:{sentinels.data[1].port}") as transport:
        with pytest.raises(UnsafeServer, match="read-only replica"):
            await transport.check()


@pytest.mark.parametrize("kind", ["redis+sentinel", "redis+cluster"])
async def test_a_single_server_is_neither_a_sentinel_nor_a_cluster(
    sentinels: SentinelSetup, kind: str
) -> None:
    path = f"/{SERVICE}" if "sentinel" in kind else ""
    url = f"{kind}://127.0.0.1:{sentinels.data[0].port}{path}"
    async with opened(url) as transport:
        with pytest.raises(UnsafeServer, match="The server at redis"):
            await transport.check()
        with pytest.raises(TransportError, match="WrongTopology"):
            await transport.store.ping()


async def test_eviction_behind_sentinels_is_refused(sentinels: SentinelSetup) -> None:
    client = sentinels.primary().client
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        async with opened(sentinels.url) as transport:
            with pytest.raises(UnsafeServer, match="noeviction"):
                await transport.check()
    finally:
        client.config_set("maxmemory-policy", "noeviction")


async def test_an_unknown_service_is_a_clear_error(sentinels: SentinelSetup) -> None:
    async with opened(sentinels.url.replace(f"/{SERVICE}", "/other")) as transport:
        with pytest.raises(TransportError, match="'other'"):
            await transport.check()


async def test_sentinels_and_servers_have_passwords_of_their_own(sentinels: SentinelSetup) -> None:
    for server in sentinels.servers:
        word = "inner" if server in sentinels.data else "outer"
        rights = ("~*", "&*", "+@all")
        server.client.execute_command("ACL", "SETUSER", "app", "on", f">{word}", *rights)
    right = sentinels.url.replace("://", "://app:inner@")
    right += "?sentinel_username=app&sentinel_password=outer"
    async with opened(right) as transport:
        await transport.check()
        assert "inner" not in transport.url
        assert "outer" not in transport.url
    for wrong in (right.replace("inner", "hunter2"), right.replace("=outer", "=hunter2")):
        async with opened(wrong) as transport:
            with pytest.raises(TransportError, match="AuthenticationError") as caught:
                await transport.check()
            assert "hunter2" not in str(caught.value)


def test_the_inspector_looks_into_the_primary(
    sentinels: SentinelSetup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect([sentinels.url, "ROLE"]) == 0
    assert "master" in capsys.readouterr().out
    assert inspect([sentinels.url.replace(f"/{SERVICE}", "/other"), "PING"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert "shared.redis.cli" in inspect_command(sentinels.url)

"""What keeps a Redis from answering is reported in plain words, once, without its password."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from penstock.launcher.processes import RedisWatch
from penstock.launcher.redis_server import PrivateServer
from shared.transport.connect import open_transport
from tests.support.polling import until


def _refusing_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.launcher.processes.LOOK_S", 0.01)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://me:secret@127.0.0.1:{port}/0", "the connection is refused"),
        ("unix:///nonexistent/redis.sock", "there is no such socket"),
        ("redis://:secret@nobody.invalid:6379/0", "the host's name is not known"),
    ],
)
async def test_the_sentence_says_why_and_is_not_repeated(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_such_name(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if "nobody" in url:  # a name server may take its time
        monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    output: list[str] = []
    transport = await open_transport(url.format(port=_refusing_port()))
    watch = RedisWatch(transport, output.append)
    assert watch.trouble is None
    looking = asyncio.create_task(watch.run())
    try:
        await until(lambda: output)
        await asyncio.sleep(0.1)
    finally:
        looking.cancel()
        await asyncio.wait((looking,))
        await transport.aclose()
    (sentence,) = output
    assert f"cannot be reached: {words}." in sentence
    assert "REDIS_URL" in sentence
    assert "secret" not in sentence
    assert watch.trouble is not None
    assert watch.trouble in sentence


async def test_a_server_that_comes_goes_and_comes_again(tmp_path: Path) -> None:
    server = PrivateServer(tmp_path / "data")
    url = server.start()
    output: list[str] = []
    transport = await open_transport(url)
    watch = RedisWatch(transport, output.append)
    looking = asyncio.create_task(watch.run())
    try:
        await until(lambda: watch.trouble is None)
        server.stop()
        await until(lambda: len(output) == 1)
        server.start()
        await until(lambda: len(output) == 2)
    finally:
        looking.cancel()
        await asyncio.wait((looking,))
        await transport.aclose()
        server.stop()
    assert "cannot be reached" in output[0]
    assert output[1].startswith("Redis answers, after ")
    assert watch.trouble is None


async def test_a_refused_password_is_reported_as_such(tmp_path: Path) -> None:
    output: list[str] = []
    with PrivateServer(tmp_path / "data") as server:
        transport = await open_transport(server.url)
        await transport.connections.commands.config_set("requirepass", "right")
        await transport.aclose()
        path = server.url.removeprefix("unix://")
        transport = await open_transport(f"unix://:wrong@{path}")
        looking = asyncio.create_task(RedisWatch(transport, output.append).run())
        try:
            await until(lambda: output)
        finally:
            looking.cancel()
            await asyncio.wait((looking,))
            await transport.aclose()
    assert "it refuses the user or password" in output[0]
    assert "wrong" not in output[0]

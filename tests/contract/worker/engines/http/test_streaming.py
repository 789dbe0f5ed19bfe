"""POSTs whose answers are read as they come, from sockets that send what a test gives them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from tests.support.launched import free_port
from worker.engines.http import streaming
from worker.engines.http.streaming import NoConnection, post

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def server(answer: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Sends the answer to each request, then closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'{"a":1}')
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"{'http' if context is None else 'https'}://localhost:{port}/x"


async def received(url: str) -> bytes:
    async with post(url, {"a": 1}, {}, 5.0) as answer:
        assert answer.status == 200
        return b"".join([chunk async for chunk in answer.chunks()])


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        OK + b"content-length: 5\r\n\r\nabcde",
        OK + b"\r\nabcde",
    ],
)
async def test_a_body_is_read_however_it_ends(answer: bytes) -> None:
    async with server(answer) as url:
        assert await received(url) == b"abcde"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", EOFError),
        (OK, EOFError),
        (CHUNKED + b"5\r\nab", EOFError),
        (OK + b"content-length: 5\r\n\r\nab", EOFError),
        (CHUNKED + b"z\r\n", ValueError),
        (CHUNKED + b"5\r\nabcde\r\n", EOFError),
        (b"SSH-2.0\r\n\r\n", ValueError),
        (OK + b"a: " + b"b" * 100_000, ValueError),
    ],
)
async def test_an_answer_that_breaks_or_is_not_http_is_an_error(
    answer: bytes, error: type[Exception]
) -> None:
    async with server(answer) as url:
        with pytest.raises(error):
            await received(url)


async def test_a_port_that_nothing_listens_at_is_no_connection() -> None:
    with pytest.raises(NoConnection):
        await received(f"http://127.0.0.1:{free_port()}/x")


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_certificate_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    authority, other = trustme.CA(), trustme.CA()
    (authority if is_trusted else other).cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trusted = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    monkeypatch.setattr(streaming, "ssl_context", lambda: trusted)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    async with server(OK + b"\r\nabc", context) as url:
        if is_trusted:
            assert await received(url) == b"abc"
        else:
            with pytest.raises(NoConnection, match="certificate"):
                await received(url)

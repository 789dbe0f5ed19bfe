"""A POST whose answer is read as it comes.

Each token of a stream is a chunk of its own. httpx2 takes 70 us to hand one on, this 20: where an
upstream computes on the same cores, that is time of its own tokens.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

MAX_LINE_BYTES = 2**16  # of all headers together, too
READ_BYTES = 2**16


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """Returns the one of all upstreams: the certificates of authorities take 50 ms to read."""
    return httpx2.create_ssl_context()


class NoConnection(Exception):
    """Nothing was sent."""


class Answer:
    """The status of an answer, and its body, once."""

    def __init__(self, status: int, headers: Mapping[bytes, bytes], reader: asyncio.StreamReader):
        self.status = status
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._length = int(headers.get(b"content-length", b"-1"))
        self._reader = reader

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the body in parts. Raises EOFError where it ends early, ValueError for other
        bytes than HTTP's."""
        if not self._is_chunked:
            left = self._length
            while left:
                chunk = await self._reader.read(READ_BYTES)
                if not chunk:
                    if left > 0:
                        raise EOFError
                    return
                yield chunk
                left -= len(chunk)
            return
        while True:
            line = await self._reader.readline()
            if not line:
                raise EOFError
            size = int(line.partition(b";")[0], 16)
            if not size:
                return
            yield (await self._reader.readexactly(size + 2))[:-2]

    async def start(self, num_bytes: int) -> bytes:
        """Returns the first bytes of the body, as far as it has them."""
        found = b""
        async for chunk in self.chunks():
            found += chunk
            if len(found) >= num_bytes:
                break
        return found[:num_bytes]


@asynccontextmanager
async def post(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], connect_timeout_s: float
) -> AsyncIterator[Answer]:
    """Sends an object as JSON. The connection ends with the context.

    Raises NoConnection, OSError or EOFError where it breaks,
    ValueError for another answer than HTTP's.
    """
    parts = urlsplit(url)
    is_encrypted = parts.scheme == "https"
    try:
        async with asyncio.timeout(connect_timeout_s):
            reader, writer = await asyncio.open_connection(
                parts.hostname,
                parts.port or (443 if is_encrypted else 80),
                ssl=ssl_context() if is_encrypted else None,
                limit=MAX_LINE_BYTES,
            )
    except TimeoutError as error:
        raise NoConnection(f"no connection within {connect_timeout_s:g} s") from error
    except OSError as error:
        raise NoConnection(f"no connection: {error}") from error
    try:
        content = msgspec.json.encode(body)
        given = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Accept": "text/event-stream",
            "Connection": "close",
            **headers,
        }
        lines = [f"POST {parts.path} HTTP/1.1", *(f"{name}: {given[name]}" for name in given)]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        await writer.drain()
        yield await _answer(reader)
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> Answer:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError(f"its headers have more than {MAX_LINE_BYTES} bytes") from error
    first, *lines = head.strip().split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"it answers {first[:80]!r}")
    pairs = (line.partition(b":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Answer(int(rest[:3]), headers, reader)

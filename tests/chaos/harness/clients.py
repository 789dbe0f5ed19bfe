"""Clients: a plain reader, one that resumes at any frontend, one that reads slowly."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from tests.chaos.harness.reading import Reading
from tests.support.polling import PATIENCE_S, until

RETRY_S = 0.1
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
TRY_AGAIN = frozenset({404, 429, 503})  # this frontend cannot, now; 404: it knows no model yet


def refusal_of(status: int, body: bytes) -> str:
    """Returns the status and the code of an error response."""
    try:
        return f"{status} {json.loads(body)['error'].get('code')}"
    except (ValueError, KeyError):
        return str(status)


class EndedEarly(Exception):
    """A reader ended before what a scenario waits for."""


class Client:
    """One answer, read by a task of its own. `start` first."""

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        prompt: list[int],
        max_tokens: int,
        *,
        first_url: int = 0,
        resumes: bool = False,
        key: str = "",
        api_key: str = "",
        **request: Any,
    ) -> None:
        """`urls` are asked at every connection; `request` are more members of the request, `key`
        its idempotency key."""
        self.reading = Reading(prompt, max_tokens)
        self.failure = ""  # how the last connection broke
        self._urls = urls
        self._turn: Iterator[int] = itertools.count(first_url)
        self._resumes = resumes
        policy = {"on_disconnect": "continue"} if resumes else {}
        self._request = {"prompt": prompt, "max_tokens": max_tokens, **policy, **request}
        self._authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = self._authorization | ({"idempotency-key": key} if key else {})
        self._task: asyncio.Task[Reading] | None = None

    def start(self) -> Client:
        self._task = asyncio.create_task(self._run())
        return self

    async def ended(self, timeout_s: float = PATIENCE_S) -> Reading:
        """When the reader has nothing more to read."""
        assert self._task is not None, "start it first"
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._task)
        except TimeoutError:
            seen = f"{self.reading.num_tokens} tokens of {self.reading.job_id}, {self.failure}"
            raise AssertionError(f"no end within {timeout_s:g} s: {seen}") from None

    async def tokens(self, at_least: int, timeout_s: float = PATIENCE_S) -> None:
        """Returns when so many tokens were read; fails when the reader ended before."""

        def are_read() -> bool:
            if self.reading.num_tokens >= at_least:
                return True
            if self._task is not None and self._task.done():
                self._task.result()
                raise EndedEarly(f"{self.reading.refusal or self.reading.ends or self.failure}")
            return False

        await until(are_read, f"{at_least} tokens to be read", timeout_s)

    @property
    def has_ended(self) -> bool:
        """Nothing more will be read."""
        return self._task is not None and self._task.done()

    async def close(self) -> None:
        """Goes away, whatever was read. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> Reading:
        reading = self.reading
        if reading.has_ended:  # before it was closed: who has read the end does not come back
            return reading
        # Certificates are of no use here, and loading them takes longer than many a stream.
        async with httpx.AsyncClient(timeout=TIMEOUT, verify=False) as http:
            while True:
                try:
                    await self._connect(http)
                    self.failure = ""
                except httpx.TransportError as error:
                    self.failure = type(error).__name__
                if reading.has_ended or not self._resumes or reading.status == 204:
                    return reading
                if reading.refusal is not None and reading.status not in TRY_AGAIN:
                    return reading
                await asyncio.sleep(RETRY_S)

    async def _connect(self, http: httpx.AsyncClient) -> None:
        reading, urls = self.reading, self._urls()
        url = urls[next(self._turn) % len(urls)]
        reading.num_connections += 1
        reading.refusal = None
        if reading.job_id:
            stream = http.stream(
                "GET",
                f"{url}/v1/jobs/{reading.job_id}/stream",
                headers={"Last-Event-ID": str(reading.cursor), **self._authorization},
            )
        else:
            stream = http.stream(
                "POST", f"{url}/generate", json=self._request, headers=self._headers
            )
        async with stream as response:
            reading.status = response.status_code
            if response.status_code != 200:
                body = await response.aread()
                reading.refusal = json.loads(body) if body else {}
                reading.refusals[refusal_of(response.status_code, body)] += 1
                return
            request_id = response.headers["x-request-id"]
            reading.job_id = reading.job_id or request_id.removeprefix("gen-")
            # Not aiter_lines: its line ends are more than SSE's.
            pending = ""
            async for piece in response.aiter_text():
                *lines, pending = (pending + piece).split("\n")
                for line in lines:
                    if line and not reading.take_line(line):
                        return


class SlowClient:
    """Reads its stream a few bytes at a time from a small socket buffer. `start` first."""

    def __init__(self, host: str, port: int, prompt: list[int], max_tokens: int) -> None:
        self.reading = Reading(prompt, max_tokens)
        self.bytes_per_s = 1.0
        self._address = (host, port)
        self._body = json.dumps(
            {"prompt": prompt, "max_tokens": max_tokens, "on_disconnect": "continue"}
        ).encode()
        self._task: asyncio.Task[Reading] | None = None

    def start(self) -> SlowClient:
        self._task = asyncio.create_task(self._run())
        return self

    @property
    def is_reading(self) -> bool:
        return self._task is not None and not self._task.done()

    async def ended(self) -> Reading:
        assert self._task is not None, "start it first"
        async with asyncio.timeout(PATIENCE_S):
            return await self._task

    async def _run(self) -> Reading:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.setblocking(False)
            await loop.sock_connect(connection, self._address)
            # HTTP/1.0 is answered without chunks, and the connection is closed at the end.
            head = (
                "POST /generate HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(self._body)}\r\n\r\n"
            )
            await loop.sock_sendall(connection, head.encode() + self._body)
            raw = b""
            while True:
                slow = self.bytes_per_s < 1000
                piece = await loop.sock_recv(connection, 1 if slow else 65536)
                if not piece:
                    break
                raw += piece
                if slow:
                    await asyncio.sleep(1 / self.bytes_per_s)
        head_bytes, _, body = raw.partition(b"\r\n\r\n")
        assert b" 200 " in head_bytes.splitlines()[0], head_bytes
        assert b"chunked" not in head_bytes.lower(), head_bytes
        for line in body.decode().split("\n"):
            if line and not self.reading.take_line(line):
                break
        return self.reading

"""Fillers: each holds as much of one pot as a valid key allows, and counts how it was refused.

    python -m tests.hostile.fillers POT BASE_URL MODEL

It writes a line when the pot is full, and after a line of its input the refusals by code, as JSON.
The key is read from WORST_KEY. Each runs in a process of its own at a low priority, as worst
clients do: dozens of connections on the event loop of the bystanders would delay what they measure.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from api.ids import parse_job_id
from shared.process import dying_with_this_process
from tests.neighbours.worst_clients import NICENESS
from tests.support.job_history import SUBMIT, HistoryWriter
from tests.support.launched import REPOSITORY

QUESTION = [{"role": "user", "content": "A gate and a wheel and water that turns it"}]


class Filler:
    """One tenant's connections, closed at the end; `refusals` by code."""

    def __init__(
        self, base_url: str, key: str, model: str, history: HistoryWriter | None = None
    ) -> None:
        self._history = history
        self.refusals: Counter[str] = Counter()
        self.model = model
        self.base_url = base_url
        self.headers = {"authorization": f"Bearer {key}"}
        self.open = AsyncExitStack()
        self.http = httpx.AsyncClient(
            base_url=base_url,
            headers=self.headers,
            timeout=120,
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Filler:
        await self.open.enter_async_context(self.http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.open.aclose()

    def refused(self, status: int, body: bytes) -> None:
        code = json.loads(body)["error"]["code"]
        self.refusals[f"{status} {code}"] += 1

    def _record(self, answer: httpx.Response) -> None:
        """Records what became of a job in the background: a refused one is never seen again."""
        job_id = parse_job_id(answer.headers.get("x-request-id", ""))
        if self._history is None or job_id is None or answer.request.url.path != "/v1/responses":
            return
        if status := {200: "accepted", 429: "refused"}.get(answer.status_code):
            begin_s = time.monotonic() - answer.elapsed.total_seconds()
            self._history.record(job_id, SUBMIT, begin_s, status=status)

    async def new_job(self, tokens: int = 1500) -> str:
        body = {"model": self.model, "input": "a", "max_output_tokens": tokens, "background": True}
        answer = await self.http.post("/v1/responses", json=body)
        answer.raise_for_status()
        return str(answer.json()["id"])

    async def hold(self, path: str) -> bool:
        """Opens a stream and keeps it unread. Returns False where it is refused."""
        response = await self.open.enter_async_context(self.http.stream("GET", path))
        if response.status_code == 200:
            return True
        self.refused(response.status_code, await response.aread())
        return False

    async def send_slowly(self, path: str, head: dict[str, str], part: bytes) -> None:
        """Sends a head and a part of a body, and waits. Counts a refusal when it comes."""
        url = urlsplit(self.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        self.open.callback(writer.close)
        lines = [f"POST {path} HTTP/1.1", f"host: {url.netloc}"]
        lines += [f"{name}: {value}" for name, value in (self.headers | head).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + part)
        task = asyncio.create_task(self._answer(reader))
        self.open.callback(task.cancel)

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        lines = head.decode().lower().split("\r\n")
        length = next(line for line in lines if line.startswith("content-length: "))
        self.refused(status, await reader.readexactly(int(length.partition(": ")[2])))

    async def again(self, count: int, one: Callable[[], Awaitable[httpx.Response]]) -> None:
        """Keeps `count` calls of `one` going until the filler is left."""

        async def keep() -> None:
            while True:
                try:
                    answer = await one()
                except httpx.HTTPError as error:  # of a frontend that is broken meanwhile
                    self.refusals[type(error).__name__] += 1
                    await asyncio.sleep(0.5)
                    continue
                self._record(answer)
                if answer.status_code != 200:
                    self.refused(answer.status_code, answer.content)
                    await asyncio.sleep(0.05)

        for _ in range(count):
            self.open.callback(asyncio.create_task(keep()).cancel)


async def open_responses(filler: Filler) -> None:
    job = await filler.new_job()
    while await filler.hold(f"/v1/jobs/{job}/stream"):
        pass


async def websockets(filler: Filler) -> None:
    url = filler.base_url.replace("http", "ws", 1) + "/v1/responses"
    while True:
        try:
            socket = connect(url, additional_headers=filler.headers)
            await filler.open.enter_async_context(socket)
        except InvalidStatus as error:
            filler.refused(error.response.status_code, error.response.body or b"")
            return


async def dashboards(filler: Filler) -> None:
    while await filler.hold("/v1/deployment/stream"):
        pass


async def dashboard_views(filler: Filler) -> None:
    while await filler.hold(f"/v1/deployment/stream?job={await filler.new_job(1)}"):
        pass


async def uploads(filler: Filler) -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{'
    head = {"content-type": "multipart/form-data; boundary=x", "content-length": "100000"}
    for _ in range(16):
        await filler.send_slowly("/v1/files", head, form)


async def body_bytes(filler: Filler) -> None:
    head = {"content-type": "application/json", "content-length": str(900_000)}
    for _ in range(8):
        await filler.send_slowly("/v1/chat/completions", head, b" " * 890_000)


async def answer_bytes(filler: Filler) -> None:
    body: dict[str, Any] = {"model": filler.model, "messages": QUESTION, "max_tokens": 40}
    body |= {"logprobs": True, "top_logprobs": 20, "n": 8}
    await filler.again(4, lambda: filler.http.post("/v1/chat/completions", json=body))


async def small_text_bytes(filler: Filler) -> None:
    body = {"model": filler.model, "prompt": "word " * 12_000}
    await filler.again(40, lambda: filler.http.post("/tokenize", json=body))


async def large_text_bytes(filler: Filler) -> None:
    body = {"model": filler.model, "prompt": "word " * 40_000}
    await filler.again(16, lambda: filler.http.post("/tokenize", json=body))


async def queue(filler: Filler) -> None:
    """More jobs in the background than may wait."""
    body = {"model": filler.model, "input": "a", "max_output_tokens": 100, "background": True}
    body["store"] = True
    await filler.again(8, lambda: filler.http.post("/v1/responses", json=body))


async def store_bytes(filler: Filler) -> None:
    """Responses of which each keeps its unused tools for an hour."""
    tool = {"type": "function", "name": "f", "description": "d" * 800_000, "parameters": {}}
    body = {"model": filler.model, "input": "a", "max_output_tokens": 1, "background": True}
    body |= {"tools": [tool], "tool_choice": "none"}
    await filler.again(2, lambda: filler.http.post("/v1/responses", json=body))


OF_ALL_FRONTENDS = (queue, store_bytes)  # pots in Redis
FILLERS = {
    filler.__name__: filler
    for filler in (
        open_responses,
        websockets,
        dashboards,
        dashboard_views,
        uploads,
        body_bytes,
        answer_bytes,
        small_text_bytes,
        large_text_bytes,
    )
}


@asynccontextmanager
async def filled(pot: str, base_url: str, key: str, model: str) -> AsyncIterator[Counter[str]]:
    """Fills a pot with what one key may have of it, until the block is left. Yields the refusals
    by code, which are complete then."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hostile.fillers", pot, base_url, model),
        cwd=REPOSITORY,
        env=os.environ | {"WORST_KEY": key},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=dying_with_this_process(),
    )
    assert process.stdout is not None
    refusals: Counter[str] = Counter()
    try:
        assert await process.stdout.readline() == b"full\n", "the pot was not filled"
        yield refusals
        async with asyncio.timeout(60):
            output, _ = await process.communicate(b"\n")
        assert process.returncode == 0
        refusals.update(json.loads(output))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def main(pot: str, base_url: str, model: str) -> None:
    os.nice(NICENESS)
    async with Filler(base_url, os.environ["WORST_KEY"], model) as filler:
        await FILLERS[pot](filler)
        async with asyncio.timeout(60):
            while not filler.refusals:
                await asyncio.sleep(0.05)
        print("full", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps(filler.refusals))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

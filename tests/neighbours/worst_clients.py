"""Worst clients: each does one thing as badly as a valid key allows.

    python -m tests.neighbours.worst_clients NAME BASE_URL MODEL SECONDS LEAST

It ends after SECONDS, or later when its counts are those of LEAST (JSON), and at the latest after
MAX_SECONDS. The key is read from WORST_KEY. Each runs in a process of its own at a low priority, so
that what the bystanders notice comes from the service and not from this client's own use of the
processor. The last line of the output is JSON: how many answers there were of each kind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

NICENESS = 10
TIMEOUT_S = 120.0
MAX_SECONDS = 60.0
QUESTION = [{"role": "user", "content": "A gate and a wheel and water that turns it"}]
FINAL_STATUSES = frozenset({"completed", "failed", "cancelled", "expired", "incomplete"})


class Worst:
    """One worst client's connection, deadline and counts."""

    def __init__(
        self, base_url: str, model: str, key: str, seconds: float, least: Mapping[str, int]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.model = model
        self.base_url = base_url
        self.headers = {"authorization": f"Bearer {key}"}
        self._begin_s = time.monotonic()
        self._seconds = seconds
        self._least = least
        self.http = httpx.AsyncClient(
            base_url=base_url,
            headers=self.headers,
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None),
        )

    @property
    def has_time(self) -> bool:
        passed_s = time.monotonic() - self._begin_s
        is_done = all(self.counts[name] >= count for name, count in self._least.items())
        return passed_s < (self._seconds if is_done else MAX_SECONDS)

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Posts JSON and counts the status."""
        answer = await self.http.post(path, json=body, **more)
        self.counts[f"POST {answer.status_code}"] += 1
        return answer

    async def stream(self, path: str, body: dict[str, Any], *, max_bytes: int = 2**62) -> int:
        """Reads an event stream, leaves it after `max_bytes`, returns how many came."""
        num_bytes = 0
        request = self.http.stream("POST", path, json=body | {"stream": True})
        async with request as response:
            self.counts[f"stream {response.status_code}"] += 1
            async for piece in response.aiter_raw():
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    break
        return num_bytes

    async def at_once(self, count: int, one: Callable[[], Awaitable[object]]) -> None:
        """Keeps `count` calls of `one` going until the time is over."""

        async def again_and_again() -> None:
            while self.has_time:
                try:
                    await one()
                except httpx.HTTPError as error:
                    self.counts[type(error).__name__] += 1

        await asyncio.gather(*(again_and_again() for _ in range(count)))


async def largest_answers(worst: Worst) -> None:
    """As many choices, tokens and alternatives as one answer may have, whole and streamed."""

    async def largest_accepted(path: str, members: dict[str, Any], limit: str) -> None:
        for max_tokens in (120, 60, 30):
            body = {"model": worst.model} | members | {limit: max_tokens}
            answer = await worst.post(path, body)
            worst.counts["largest body"] = max(worst.counts["largest body"], len(answer.content))
            if answer.status_code != 400:
                await worst.stream(path, body)
                return

    chat = {"messages": QUESTION, "logprobs": True, "top_logprobs": 20, "n": 128}
    completions = {"prompt": [QUESTION[0]["content"]] * 64, "n": 2, "logprobs": 5, "echo": False}
    responses = {
        "input": QUESTION[0]["content"],
        "top_logprobs": 20,
        "include": ["message.output_text.logprobs"],
    }
    await asyncio.gather(
        largest_accepted("/v1/chat/completions", chat, "max_tokens"),
        largest_accepted("/v1/completions", completions, "max_tokens"),
        largest_accepted("/v1/responses", responses, "max_output_tokens"),
        largest_accepted("/v1/messages", {"messages": QUESTION}, "max_tokens"),
    )


async def most_choices(worst: Worst) -> None:
    """Jobs with as many choices as a job may have, one after the other."""
    body = {"model": worst.model, "messages": QUESTION, "n": 128, "max_tokens": 16}
    await worst.at_once(2, lambda: worst.post("/v1/chat/completions", body))


async def slow_readers(worst: Worst) -> None:
    """Readers of one byte a second of what has many bytes, from small socket buffers."""
    host, port = urlsplit(worst.base_url).hostname, urlsplit(worst.base_url).port
    body = json.dumps(
        {
            "model": worst.model,
            "messages": QUESTION,
            "logprobs": True,
            "top_logprobs": 20,
            "max_tokens": 200,
            "stream": True,
        }
    ).encode()
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {host}:{port}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in worst.headers.items()),
    ]
    loop = asyncio.get_running_loop()

    async def read_slowly() -> None:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, port))
            await loop.sock_sendall(connection, "\r\n".join([*head, "", ""]).encode() + body)
            while worst.has_time:
                async with asyncio.timeout(5):
                    worst.counts["bytes read slowly"] += len(await loop.sock_recv(connection, 1))
                await asyncio.sleep(1)

    await asyncio.gather(*(read_slowly() for _ in range(80)), return_exceptions=True)


async def flood(worst: Worst) -> None:
    """More background jobs than may run and wait, as fast as they are taken, and on when they are
    not. At the end it cancels them: the next worst client finds its tenant's places free."""
    body = {"model": worst.model, "input": "flood", "max_output_tokens": 2000, "background": True}
    accepted: list[str] = []

    async def one() -> None:
        answer = await worst.post("/v1/responses", body)
        if answer.status_code == 200:
            accepted.append(answer.json()["id"])

    async def cancel() -> None:
        while accepted:
            await worst.http.post(f"/v1/responses/{accepted.pop()}/cancel")

    await worst.at_once(24, one)
    await asyncio.gather(*(cancel() for _ in range(24)))


async def aborts(worst: Worst) -> None:
    """Streams that are left at their first bytes, in every dialect."""
    bodies: Sequence[tuple[str, dict[str, Any]]] = (
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 500}),
        ("/v1/completions", {"prompt": ["a b c"] * 8, "max_tokens": 500}),
        ("/v1/responses", {"input": "a b c", "max_output_tokens": 500}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 500}),
    )

    async def leave() -> None:
        path, body = random.choice(bodies)
        await worst.stream(path, {"model": worst.model} | body, max_bytes=random.choice((0, 2000)))

    await worst.at_once(16, leave)


async def huge_batch(worst: Worst) -> None:
    """A batch of thousands of rows, while others wait for their answers."""
    rows = (
        {
            "custom_id": f"row-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": worst.model, "messages": QUESTION, "max_tokens": 16},
        }
        for i in range(5000)
    )
    data = "\n".join(map(json.dumps, rows)).encode()
    upload = await worst.http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", data)}
    )
    worst.counts[f"upload {upload.status_code}"] += 1
    created = await worst.post(
        "/v1/batches",
        {
            "input_file_id": upload.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    )
    path = f"/v1/batches/{created.json()['id']}"
    while worst.has_time:
        batch = (await worst.http.get(path)).json()
        worst.counts["rows completed"] = batch["request_counts"]["completed"]
        await asyncio.sleep(0.2)
    cancelled = await worst.http.post(f"{path}/cancel")
    worst.counts[f"cancel {cancelled.status_code}"] += 1


async def huge_bodies(worst: Worst) -> None:
    """Bodies at their limits: many blocks, one long text, deep nesting, many small members."""
    block = {"type": "text", "text": "x" * 12}
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    bodies: Sequence[tuple[str, Any]] = (
        ("/v1/messages", {"messages": [{"role": "user", "content": [block] * 20_000}]}),
        ("/v1/messages", {"messages": [QUESTION[0], {**QUESTION[0]}] * 10_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 500_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [block] * 20_000}]}),
        ("/v1/chat/completions", {"messages": QUESTION * 20_000}),
        ("/v1/responses", {"input": QUESTION * 20_000}),
        ("/tokenize", {"prompt": "word " * 500_000}),
        ("/detokenize", {"tokens": [7] * 400_000}),
        ("/v1/completions", {"prompt": ["a b c"] * 64, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [7] * 500_000}),
    )

    async def send() -> None:
        if random.random() < 0.1:
            answer = await worst.http.post(
                "/v1/chat/completions", content=deep, headers={"content-type": "application/json"}
            )
            worst.counts[f"POST {answer.status_code}"] += 1
            return
        path, body = random.choice(bodies)
        limit = {} if "tokenize" in path or "responses" in path else {"max_tokens": 4}
        await worst.post(path, {"model": worst.model} | limit | body)

    await worst.at_once(4, send)


async def reconnects(worst: Worst) -> None:
    """Readers of running jobs that come, read a little, leave and come back."""
    ids = []
    for _ in range(4):
        body = {"model": worst.model, "input": "a b", "max_output_tokens": 800, "background": True}
        ids.append((await worst.post("/v1/responses", body)).json()["id"])

    async def come_back() -> None:
        path = f"/v1/jobs/{random.choice(ids)}/stream"
        async with worst.http.stream("GET", path) as response:
            worst.counts[f"tail {response.status_code}"] += 1
            async for _ in response.aiter_raw():
                break

    await worst.at_once(24, come_back)
    for name in ids:
        await worst.http.delete(f"/v1/jobs/{name}")


async def every_route(worst: Worst) -> None:
    """Every documented route, again and again: reads as they are, writes with a wrong body."""
    document = (await worst.http.get("/openapi.json")).json()
    calls = [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, methods in document["paths"].items()
        for method in methods
    ]
    # What lists most, with the jobs that another tenant runs meanwhile.
    calls += [("GET", f"/v1/jobs?limit=1000&state={state}") for state in ("running", "finished")]

    async def call() -> None:
        method, path = random.choice(calls)
        body = None if method == "GET" else {"model": worst.model, "messages": "no"}
        async with worst.http.stream(method, path, json=body) as answer:
            worst.counts[f"{method} {answer.status_code // 100}xx"] += 1
            # A dashboard's stream goes on for minutes: it is left at its first piece.
            async for _ in answer.aiter_raw():
                if path == "/v1/deployment/stream":
                    break

    await worst.at_once(12, call)


async def waiting_streams(worst: Worst) -> None:
    """Hundreds of streams that wait in the queue behind one another."""
    body = {"model": worst.model, "messages": QUESTION, "max_tokens": 16}
    streams = (worst.stream("/v1/chat/completions", body) for _ in range(180))
    await asyncio.gather(*streams)


async def grammars(worst: Worst) -> None:
    """Schemas and expressions that are dear to compile or to follow, valid and not."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        deep = {"type": "object", "properties": {"a": deep, "b": deep | {}}, "required": ["a"]}
    wide = {
        "type": "object",
        "properties": {f"member_{i}": {"type": "string"} for i in range(600)},
    }
    schemas: Sequence[dict[str, Any]] = (
        wide,
        {"type": "array", "items": {"type": "integer", "maximum": 10**9}, "maxItems": 500},
        {"type": "string", "pattern": "(a?){200}b{200}"},
        {"enum": [f"value {i}" * 4 for i in range(400)]},
        {"type": "string", "pattern": "(x+x+)+y"},
    )

    async def ask() -> None:
        schema = random.choice(schemas)
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {"messages": QUESTION, "max_tokens": 8, "response_format": form}
        await worst.post("/v1/chat/completions", {"model": worst.model} | body)

    await worst.at_once(4, ask)


KINDS: dict[str, Callable[[Worst], Coroutine[Any, Any, None]]] = {
    kind.__name__: kind
    for kind in (
        largest_answers,
        most_choices,
        slow_readers,
        flood,
        aborts,
        huge_batch,
        huge_bodies,
        reconnects,
        every_route,
        waiting_streams,
        grammars,
    )
}


async def run(
    name: str, base_url: str, model: str, seconds: float, least: Mapping[str, int]
) -> Counter[str]:
    worst = Worst(base_url, model, os.environ["WORST_KEY"], seconds, least)
    try:
        await KINDS[name](worst)
    finally:
        await worst.http.aclose()
    return worst.counts


def main() -> None:
    name, base_url, model, seconds, least = sys.argv[1:]
    os.nice(NICENESS)
    counts = asyncio.run(run(name, base_url, model, float(seconds), json.loads(least)))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

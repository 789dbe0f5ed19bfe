"""What a reader of a stream may count on, through the whole service."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.launched import REPOSITORY, Launched
from tests.support.service_client import (
    CLOSE_LOOK,
    Event,
    ServiceClient,
    echo,
    events_of,
    stream_all,
    token_ids_of,
)
from tests.support.service_fixtures import *  # noqa: F403
from tests.support.throttle import FAULTS, Throttle

STEP_MS = 10
SEATS = 8
PROXY_PATIENCE_S = 3.0  # many keep-alives: on a busy machine some come late
CHAT: dict[str, Any] = {
    "model": "penstock-demo",
    "messages": [{"role": "user", "content": "First Citizen: 😀 héllo"}],
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, throttle: Throttle
) -> Iterator[ServiceClient]:
    env = {
        **CLOSE_LOOK,
        **throttle.env,
        "PYTHONPATH": f"{FAULTS}{os.pathsep}{REPOSITORY}",
        "ECHO_STEP_MS": str(STEP_MS),
        "MAX_NUM_SEQS": str(SEATS),
        "KEEPALIVE_S": "0.2",
        "LEASE_MS": "3000",
    }
    with (
        Launched(tmp_path_factory.mktemp("streaming"), env, is_forked=False) as penstock,
        ServiceClient(penstock) as made,
    ):
        yield made


@pytest.mark.promise("Streaming: tokens are streamed as they are generated")
@pytest.mark.promise("Streaming: at its token limit a stream ends cleanly")
@pytest.mark.promise("Chat: one chunk per delta of text, sent when it is generated")
@pytest.mark.promise("HTTP: tokens are sent as they are decoded")
@pytest.mark.alone
def test_each_token_arrives_when_it_is_made(service: ServiceClient) -> None:
    *tokens, last, done = service.generate("First Citizen:", 50)
    assert done.payload is None
    assert last.payload is not None
    assert last.payload["usage"]["completion_tokens"] == 50
    # Read as one blob they would have one arrival time, and the first no lead over the last.
    assert len({round(event.at_s, 3) for event in tokens}) >= 10
    assert last.at_s - tokens[0].at_s >= 10 * STEP_MS / 1000


@pytest.mark.promise("Streaming: the first event is marked and has the time to the first token")
def test_the_time_to_the_first_token_is_reported_as_the_client_measures_it(
    service: ServiceClient,
) -> None:
    begin_s = time.monotonic()
    events = service.generate("How long until the first?", 3)
    measured_ms = (events[0].at_s - begin_s) * 1000
    assert events[0].payload is not None
    assert events[0].payload["is_first"] is True
    # The client's watch covers the server's, and the first token costs a step.
    assert STEP_MS <= events[0].payload["ttft_ms"] <= measured_ms
    job = service.http.get(f"/v1/jobs/{events[0].payload['id']}").json()
    assert 0 <= job["timings"]["queue_ms"] <= job["timings"]["ttft_ms"] <= measured_ms + 1


@pytest.mark.promise("Chat: the last chunk has an empty delta and the finish reason")
@pytest.mark.promise(
    "Chat: id, time, model and object stay the same through a stream, also across workers"
)
def test_a_stream_keeps_its_name_and_its_tokens_when_its_worker_is_killed(
    service: ServiceClient, throttle: Throttle
) -> None:
    body = {**CHAT, "max_tokens": 120, "return_token_ids": True}
    throttle.apply(20)
    with service.stream("/v1/chat/completions", body) as events:
        received = [next(events) for _ in range(10)]
        os.kill(service.pid_of("worker"), signal.SIGKILL)
        throttle.release()
        received += events
    *chunks, done = received
    assert done.payload is None
    payloads = [event.payload for event in chunks if event.payload]
    assert {payload["object"] for payload in payloads} == {"chat.completion.chunk"}
    for name in ("id", "created", "model"):
        assert len({payload[name] for payload in payloads}) == 1, name
    prompt = payloads[0]["prompt_token_ids"]
    spoken = [t for payload in payloads for t in payload["choices"][0].get("token_ids", [])]
    assert spoken == echo(prompt, 120)
    assert payloads[-1]["choices"][0]["delta"] == {}
    assert payloads[-1]["choices"][0]["finish_reason"] == "length"
    assert service.http.get(f"/v1/jobs/{payloads[0]['id']}").json()["attempt"] == 2
    service.until(lambda: service.health()["status"] == "ok", "the worker's successor")


@pytest.mark.promise("Streaming: unique ids in order of time; the submit time is recorded")
@pytest.mark.promise("Streaming: each stream gets its own tokens, without loss or repeats")
def test_two_hundred_streams_lose_and_double_nothing(service: ServiceClient) -> None:
    prompts = [[300 + (7 * i + j) % 900 for j in range(3 + i % 11)] for i in range(200)]
    bodies = [{"prompt": prompt, "max_tokens": 5 + i % 20} for i, prompt in enumerate(prompts)]
    streams = asyncio.run(stream_all(service.base_url, bodies))
    names = set()
    for prompt, body, events in zip(prompts, bodies, streams, strict=True):
        assert token_ids_of(events) == echo(prompt, int(str(body["max_tokens"])))
        payloads = [event.payload for event in events if event.payload]
        assert events[-1].payload is None
        assert payloads[-1]["full_text"] == "".join(payload["text"] for payload in payloads)
        names.add(payloads[0]["id"])
    assert len(names) == 200
    service.until_idle()


TEXTS = (
    "a river, a wheel, a lamp",
    "emoji 😀👩‍👩‍👧‍👦🇨🇭 and flags",
    "水门提升，水轮机旋转。",
    "def run(x: int) -> int:\n    return x ** 2  # naïve\n",
    "עברית العربية हिन्दी ไทย",
)


@pytest.mark.promise("Chat: the chunks concatenated equal the unstreamed response")
@pytest.mark.promise("Runtime: invalid bytes are U+FFFD, once, also at the end")
@pytest.mark.promise("Runtime: unstreamed text is decoded in the same way")
def test_deltas_put_together_are_the_unstreamed_answer(service: ServiceClient) -> None:
    def compare(number: int) -> tuple[str, str]:
        body = {
            "model": "penstock-demo",
            "prompt": f"{TEXTS[number % len(TEXTS)]} {number}",
            "max_tokens": 10 + number % 13,  # some of them end inside a character
        }
        with service.stream("/v1/completions", body) as events:
            streamed = [e.payload["choices"][0] for e in events if e.payload]
        whole = service.http.post("/v1/completions", json=body).json()["choices"][0]
        assert streamed[-1]["finish_reason"] == whole["finish_reason"] == "length"
        return "".join(choice["text"] for choice in streamed), whole["text"]

    with ThreadPoolExecutor(SEATS) as pool:
        pairs = list(pool.map(compare, range(50)))
    assert [streamed for streamed, _ in pairs] == [whole for _, whole in pairs]
    assert any(whole.endswith("\N{REPLACEMENT CHARACTER}") for _, whole in pairs)
    assert all("\N{REPLACEMENT CHARACTER}" not in whole[:-1] for _, whole in pairs)


class ImpatientProxy:
    """Passes bytes on; ends a connection whose server was silent for PROXY_PATIENCE_S."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self.num_cut = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            to_server.write(await reader.readuntil(b"}"))
            while data := await asyncio.wait_for(from_server.read(65536), PROXY_PATIENCE_S):
                writer.write(data)
                await writer.drain()
        except TimeoutError:
            self.num_cut += 1
        finally:
            to_server.close()
            writer.close()


async def through(proxy: ImpatientProxy, body: str) -> str:
    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close"
        head += f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n{body}".encode())
        received = await reader.read()
        writer.close()
    return received.decode()


@pytest.mark.promise("Chat: comments keep quiet streams alive through proxies with short timeouts")
@pytest.mark.alone
def test_keepalives_carry_a_waiting_stream_through_an_impatient_proxy(
    service: ServiceClient,
) -> None:
    seats_taken = {"prompt": "busy", "max_tokens": 1500}
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        busy = [stack.enter_context(service.stream("/generate", seats_taken)) for _ in range(SEATS)]
        service.until(lambda: service.health()["running"] == SEATS, "all seats taken")
        proxy = ImpatientProxy(service.penstock.port)
        body = '{"prompt": "the ninth", "max_tokens": 5}'
        reading = pool.submit(lambda: asyncio.run(through(proxy, body)))

        def has_waited_long() -> bool:
            queued = service.http.get("/v1/jobs?state=queued").json()["data"]
            return bool(queued) and time.time() - queued[0]["created_at"] > 1.5 * PROXY_PATIENCE_S

        service.until(has_waited_long, "a wait that is longer than the proxy's patience")
        assert len(busy) == SEATS
        stack.close()  # they leave and so make room
        received = reading.result()
    assert proxy.num_cut == 0
    assert received.count(": ka") >= 3
    events = list(events_of(iter(received.splitlines())))
    assert events[-1].payload is None
    assert events[0].payload is not None
    job = service.http.get(f"/v1/jobs/{events[0].payload['id']}").json()
    # It was silent for longer than the proxy waits: only the comments kept the line open.
    assert job["timings"]["queue_ms"] > PROXY_PATIENCE_S * 1000


@pytest.mark.promise(
    "Chat: a slow reader delays no other, and one that stops reading is disconnected"
)
def test_a_reader_that_stops_reading_delays_no_other(service: ServiceClient) -> None:
    body = b'{"prompt": "stopped", "max_tokens": 1500}'
    with socket.socket() as stopped:
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stopped.connect(("127.0.0.1", service.penstock.port))
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        stopped.sendall(head + body)

        def running() -> list[dict[str, Any]]:
            return list(service.http.get("/v1/jobs?state=running").json()["data"])

        (own,) = service.until(running, "the job of the one who stopped")
        others: list[list[Event]] = []

        def read(number: int) -> None:
            others.append(service.generate([400 + number], 30))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(len(token_ids_of(events)) for events in others) == [30] * 5
        (later,) = running()
        assert later["id"] == own["id"]
        assert later["usage"]["completion_tokens"] > own["usage"]["completion_tokens"]
    service.until_idle()  # closing the socket has cancelled it

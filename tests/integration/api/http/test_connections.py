"""Connections: heads without end, offers of other protocols, old versions, stopped readers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import api.http.uvicorn_compat
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_service, wait_until

BODY = b'{"prompt": "water", "max_tokens": 3, "stream": false}'
H2C = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
JSON = b"Content-Type: application/json\r\n"
TO_GENERATE = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + JSON
FRAMINGS = {
    "length": (b"Content-Length: %d\r\n" % len(BODY), BODY),
    "chunks": (
        b"Transfer-Encoding: chunked\r\n",
        b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    ),
}


def read_answer(made: socket.socket) -> tuple[int, bytes]:
    """Status and body of an answer that says its length."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = made.recv(65536)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert headers["x-request-id"]
    while len(body) < int(headers["content-length"]):
        body += made.recv(65536)
    return int(lines[0].split()[1]), body


def read_all(made: socket.socket) -> bytes:
    """Until the other side has closed."""
    received = b""
    while piece := made.recv(65536):
        received += piece
    return received


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("split", ["together", "apart", "byte by byte"])
def test_a_client_that_would_like_http2_is_answered_in_http1(
    service: RunningService,
    framing: str,
    split: str,
) -> None:
    header, body = FRAMINGS[framing]
    head = TO_GENERATE + H2C + header + b"\r\n"
    pieces = {
        "together": [head + body],
        "apart": [head, body],
        "byte by byte": [bytes([byte]) for byte in head + body],
    }[split]
    with service.connect() as made:
        for _ in range(2):
            for piece in pieces:
                made.sendall(piece)
            status, answer = read_answer(made)
            assert (status, json.loads(answer)["finish_reason"]) == (200, "length")
        made.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n" + H2C + b"\r\n")
        assert read_answer(made)[0] == 200


def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection(service: RunningService) -> None:
    body = b'{"prompt": "water", "max_tokens": 3}'
    with service.connect() as made:
        made.sendall(
            b"POST /generate HTTP/1.0\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        head, _, answer = read_all(made).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert answer.startswith((b": ka\n", b"data: {"))
    assert answer.endswith(b"data: [DONE]\n\n")
    with service.connect() as made:
        made.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert json.loads(read_all(made).partition(b"\r\n\r\n")[2])["object"] == "list"


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX-Endless: ", b"\r\n"])
def test_an_endless_head_is_refused(service: RunningService, start: bytes) -> None:
    with service.connect() as made:
        made.sendall(start)
        answer = b""
        # It closes while there is more to read: what it said may be lost on the way.
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                made.sendall((b"\r\n" if start == b"\r\n" else b"aa") * 32_768)
            raise AssertionError("64 MB of a head were taken")
        with contextlib.suppress(ConnectionError):
            answer = read_all(made)
        assert answer == b"" or b" 431 " in answer.splitlines()[0]


def test_a_head_that_is_too_large_gets_a_431(service: RunningService) -> None:
    with service.connect() as made:
        made.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(3):
            made.sendall(b"X-Large: " + b"a" * 30_000 + b"\r\n")
        status, body = read_answer(made)
    assert status == 431
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_a_head_that_never_ends_is_not_waited_for(
    service: RunningService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api.http.uvicorn_compat, "HEAD_TIMEOUT_S", 0.2)
    for start in (b"", b"GET /heal"):
        with service.connect() as made:
            made.sendall(start)
            assert read_all(made) == b""
    # Long enough that even on a busy machine a whole head comes in time.
    monkeypatch.setattr(api.http.uvicorn_compat, "HEAD_TIMEOUT_S", 2.0)
    with service.connect() as made:  # the timeout is of the head alone
        body = b'{"prompt": "water", "max_tokens": 3, "stream": false}'
        made.sendall(TO_GENERATE + b"Content-Length: %d\r\n\r\n" % len(body))
        time.sleep(2.5)
        made.sendall(body)
        assert read_answer(made)[0] == 200


def test_garbage_after_a_request_does_not_end_up_in_its_stream(service: RunningService) -> None:
    service.script.step_s = 0.01
    body = b'{"prompt": "water", "max_tokens": 400}'
    with service.connect() as made:
        made.sendall(TO_GENERATE + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = b""
        while b"is_first" not in received:
            received += made.recv(65536)
        made.sendall(b"\x00\x01 no http\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            received += read_all(made)
    assert received.count(b"HTTP/1.1 ") == 1


STREAM = {"prompt": "water and iron", "max_tokens": 60}


def post(made: socket.socket, path: str, body: dict[str, object]) -> None:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n"
    made.sendall(head.encode() + JSON + b"\r\n" + payload)


def last_job(service: RunningService) -> dict[str, Any]:
    wait_until(lambda: service.worker.seen, "the job")
    job_id = service.worker.seen[-1].job.job_id
    return dict(httpx.get(f"{service.base_url}/v1/jobs/{job_id}").json())


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_closes_its_own_side_counts_as_gone(
    service: RunningService, streamed: bool
) -> None:
    """As for every server on asyncio: it cannot be told from a client that has left."""
    service.script.stop_after = 2
    with service.request({**STREAM, "stream": streamed}, "/generate") as made:
        wait_until(lambda: service.worker.seen, "the job")
        made.shutdown(socket.SHUT_WR)
        assert b'"done":true' not in read_all(made)
    wait_until(lambda: last_job(service)["status"] == "cancelled", "the cancel")


def stop_reading(made: socket.socket, service: RunningService, **more: object) -> None:
    """Asks for more than all buffers in between hold."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "on and on"}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        **more,
    }
    post(made, "/v1/chat/completions", body)
    wait_until(lambda: service.worker.seen, "the job")


@contextmanager
def narrow_connection(service: RunningService) -> Iterator[socket.socket]:
    """One whose buffers, the server's kernel's too, hold little."""
    address = urlsplit(service.base_url)
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        made.connect((str(address.hostname), address.port or 0))
        yield made


@pytest.mark.parametrize(("policy", "status"), [("cancel", "cancelled"), ("continue", "finished")])
def test_a_client_that_stops_reading_is_cut_off_and_counts_as_gone(
    redis_url: str,
    checkpoint: Path,
    policy: str,
    status: str,
) -> None:
    with running_service(redis_url, new_namespace(), checkpoint, write_timeout_s=1.0) as strict:
        strict.script.stop_after = 300  # tokens enough to fill what is in between
        with narrow_connection(strict) as made:
            stop_reading(made, strict, on_disconnect=policy)
            open_requests = strict.app.state.open_requests
            wait_until(lambda: len(open_requests) == 1, "the answer to begin")
            wait_until(lambda: not len(open_requests), "its place to be free again")
            strict.script.stop_after = None
            wait_until(lambda: last_job(strict)["status"] == status, "what its policy says")
        assert httpx.post(f"{strict.base_url}/generate", json=STREAM).status_code == 200


def test_without_a_limit_a_stopped_reader_is_waited_for(
    redis_url: str,
    checkpoint: Path,
) -> None:
    with (
        running_service(redis_url, new_namespace(), checkpoint, write_timeout_s=0) as patient,
        narrow_connection(patient) as made,
    ):
        stop_reading(made, patient)
        wait_until(lambda: last_job(patient)["status"] == "finished", "the end of the job")
        assert len(patient.app.state.open_requests) == 1
        made.settimeout(60)
        received = b""
        while b"[DONE]" not in received:
            received += made.recv(65536)
        wait_until(lambda: not len(patient.app.state.open_requests), "the end of the answer")

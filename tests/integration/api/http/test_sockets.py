"""Sockets that break the rules: an error object or a closed connection, and the service goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import api.http.uvicorn_compat
from tests.support.api_document import json_routes
from tests.support.redis_server import new_namespace
from tests.support.running_service import RunningService, running_service, wait_until
from tests.support.scripted_worker import Script
from tests.support.table import table

MAX_BODY_BYTES = 65_536
TIMEOUT_S = 30
PATIENCE_S = 30.0
JSON_ROUTES = json_routes()
GENERATE = b'{"prompt": "water", "max_tokens": 3, "stream": false}'
FUZZED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def strict(redis_url: str, checkpoint: Path) -> Iterator[RunningService]:
    """A service with small limits."""
    limits = {"max_body_bytes": MAX_BODY_BYTES, "body_timeout_s": PATIENCE_S}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.http.uvicorn_compat, "LINGER_S", 0.3)
        with running_service(redis_url, new_namespace(), checkpoint, **limits) as made:
            yield made


@pytest.fixture(autouse=True)
def alive(strict: RunningService) -> Iterator[None]:
    """Whatever a test did: the next client is served, and nothing is left open."""
    strict.worker.script = Script()
    yield
    body = {"prompt": "alive", "max_tokens": 2, "stream": False}
    answer = httpx.post(f"{strict.base_url}/generate", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200
    wait_until(lambda: not len(strict.app.state.open_requests), "all answers to end")


def read_all(made: socket.socket) -> bytes:
    """Until the other side has closed, in whatever way."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := made.recv(65536):
            received += piece
    return received


def exchange(service: RunningService, sent: bytes, *, shut: bool = True) -> bytes:
    """What comes back for these bytes; `shut`: no more will come from here."""
    with service.connect() as made:
        with contextlib.suppress(ConnectionError):
            made.sendall(sent)
            if shut:
                made.shutdown(socket.SHUT_WR)
        return read_all(made)


def to(path: str) -> bytes:
    """The head of a POST of JSON, but for its framing."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


TO_GENERATE = to("/generate")


def post(path: str, headers: str = "", body: bytes = GENERATE) -> bytes:
    head = to(path) + f"Content-Length: {len(body)}\r\n{headers}\r\n".encode()
    return head + body


def assert_refused(received: bytes) -> None:
    """An error object, or nothing at all."""
    if not received:
        return
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert 400 <= status < 500, received
    assert b"x-request-id: " in head.lower()
    assert json.loads(body)["error"]["message"]


def answers_in(received: bytes) -> list[int]:
    """Statuses of the answers, one behind the other, each with its length."""
    statuses = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        statuses.append(int(lines[0].split()[1]))
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        received = rest[int(headers.get("content-length", "0")) :]
    return statuses


# --- slow ---


def trickle(made: socket.socket, pieces: Iterator[bytes]) -> bytes:
    """Sends a piece now and then until the other side ends it; what it said."""
    made.settimeout(0.02)
    deadline_s = time.monotonic() + PATIENCE_S
    received = b""
    for piece in pieces:
        assert time.monotonic() < deadline_s, "it was waited for without end"
        try:
            made.sendall(piece)
            came = made.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            break
        if not came:
            break
        received += came
    return received


def test_a_head_that_trickles_in_is_given_up(
    strict: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.http.uvicorn_compat, "HEAD_TIMEOUT_S", 0.4)
    head = TO_GENERATE + b"X-Slow: " + b"a" * 100_000
    with strict.connect() as made:
        assert trickle(made, (bytes([byte]) for byte in head)) == b""


def test_heads_that_trickle_in_on_a_used_connection_are_given_up(
    strict: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.http.uvicorn_compat, "HEAD_TIMEOUT_S", 0.4)
    with strict.connect() as made:
        made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert made.recv(65536).startswith(b"HTTP/1.1 200")
        head = b"GET /health HTTP/1.1\r\n" + b"X-Slow: " + b"a" * 100_000
        trickle(made, (bytes([byte]) for byte in head))


@pytest.fixture
def impatient(strict: RunningService, monkeypatch: pytest.MonkeyPatch) -> RunningService:
    """The service, with less time for bodies."""
    monkeypatch.setattr(strict.app.state.services.reader, "timeout_s", 0.4)
    return strict


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_a_body_that_trickles_in_is_given_up(impatient: RunningService, path: str) -> None:
    head = post(path, body=b" " * 50_000).partition(b" " * 100)[0]
    with impatient.connect() as made:
        received = trickle(made, iter([head, *[b" "] * 40_000]))
    assert received.startswith(b"HTTP/1.1 408"), received
    assert b"x-should-retry: false" in received
    assert_refused(received)


def test_chunks_that_trickle_in_are_given_up(impatient: RunningService) -> None:
    head = TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n"
    with impatient.connect() as made:
        received = trickle(made, iter([head, *[b"1\r\n \r\n"] * 40_000]))
    assert received.startswith(b"HTTP/1.1 408"), received


def test_silent_connections_do_not_keep_others_out(strict: RunningService) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(200):
            made = stack.enter_context(strict.connect())
            made.sendall(b"POST /generate HTTP/1.1\r\n"[: number % 26])
        assert httpx.get(f"{strict.base_url}/health", timeout=TIMEOUT_S).status_code == 200


# --- too much ---


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_a_body_over_the_limit_is_refused_announced_or_not(
    strict: RunningService, path: str
) -> None:
    large = post(path, "Connection: close\r\n", b" " * (MAX_BODY_BYTES + 1))
    announced = exchange(strict, large, shut=False)
    head = to(path) + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    chunked = exchange(strict, head + chunk * (MAX_BODY_BYTES // 4096 + 2), shut=False)
    for received in (announced, chunked):
        assert_refused(received)
        if received:  # what it said may be lost where it closed with more to read
            assert received.startswith(b"HTTP/1.1 413")


def test_a_length_beyond_all_numbers_is_refused(strict: RunningService) -> None:
    for length in ("9" * 18, "9" * 30, "9" * 5000):
        head = TO_GENERATE.decode() + f"Content-Length: {length}\r\n\r\n"
        assert_refused(exchange(strict, head.encode() + b"{", shut=False))


def test_as_many_headers_as_fit_are_read(strict: RunningService) -> None:
    few = "".join(f"x{number}: 1\r\n" for number in range(4000))
    received = exchange(strict, post("/generate", few + "Connection: close\r\n"), shut=False)
    assert received.startswith(b"HTTP/1.1 200")
    many = "".join(f"x{number}: 1\r\n" for number in range(20_000))
    assert_refused(exchange(strict, post("/generate", many), shut=False))


@pytest.mark.parametrize("line", [b"X-More: " + b"a" * 100 + b"\r\n", b"a" * 64 + b"\r\n"])
def test_trailers_without_end_are_not_kept(strict: RunningService, line: bytes) -> None:
    head = TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n"
    with strict.connect() as made:
        made.sendall(head + b"2\r\n{}\r\n0\r\n")
        taken = 0
        with contextlib.suppress(ConnectionError):
            while taken < 64 * 2**20:
                made.sendall(line * 512)
                taken += 512 * len(line)
        assert taken < 64 * 2**20, "64 MiB of trailers were taken"
        assert_refused(read_all(made))


@pytest.mark.parametrize("start", [b"2;x=", b"0" * 100])
def test_an_endless_chunk_size_is_not_read_forever(strict: RunningService, start: bytes) -> None:
    head = TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n"
    with strict.connect() as made:
        made.sendall(head + start)
        taken = 0
        with contextlib.suppress(ConnectionError):
            while taken < 64 * 2**20:
                made.sendall(b"0" * 65536)
                taken += 65536
        assert taken < 64 * 2**20, "64 MiB of a size were taken"
        assert_refused(read_all(made))


# --- broken ---

CHUNKED = TO_GENERATE + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN_FRAMINGS = {
    "a size that is no number": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a negative size": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "a size beyond all numbers": CHUNKED + b"f" * 40 + b"\r\n{}\r\n0\r\n\r\n",
    "no line end behind a chunk": CHUNKED + b"2\r\n{}0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    "no size": CHUNKED + b"\r\n\r\n",
    "chunks that end too soon": CHUNKED + b"5\r\n{}",
    "two lengths": TO_GENERATE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "a length and chunks": TO_GENERATE + b"Content-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunks that are not the last coding": TO_GENERATE
    + b"Transfer-Encoding: chunked, gzip\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a coding nobody knows": TO_GENERATE + b"Transfer-Encoding: zebra\r\n\r\n{}",
    "a negative length": TO_GENERATE + b"Content-Length: -2\r\n\r\n{}",
    "a length in words": TO_GENERATE + b"Content-Length: two\r\n\r\n{}",
    "a length with a sign": TO_GENERATE + b"Content-Length: +2\r\n\r\n{}",
    "a body that ends too soon": TO_GENERATE + b"Content-Length: 9\r\n\r\n{",
    "another version": b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.9\r\n",
    "a secure greeting": bytes.fromhex("16030100c8010000c40303") + b"\x00" * 190,
    "a method nobody knows": b"ZEBRA /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "no path": b"GET HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a path with spaces": b"GET /a b c HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a path with a null": b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
    "a header with a null": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n",
    "a header name with a space": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX y: 1\r\n\r\n",
    "a folded header": TO_GENERATE + b"X: 1\r\n Content-Length: 2\r\n\r\n",
    "a lone return in a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\rb\r\n\r\n",
}


@pytest.mark.promise(
    "Clients: any input over a socket is answered with an error object or a closed connection, in "
    "bounded time and memory"
)
@pytest.mark.parametrize("name", BROKEN_FRAMINGS)
def test_what_breaks_http_is_refused_or_closed(strict: RunningService, name: str) -> None:
    assert_refused(exchange(strict, BROKEN_FRAMINGS[name]))


@given(data=st.binary(min_size=1, max_size=200))
@FUZZED
def test_random_bytes_are_refused_or_closed(strict: RunningService, data: bytes) -> None:
    assert_refused(exchange(strict, data))


@given(data=st.data())
@FUZZED
def test_a_damaged_request_is_answered_or_closed(
    strict: RunningService, data: st.DataObject
) -> None:
    raw = bytearray(post("/generate", "Connection: close\r\nX-A: b\r\n"))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    received = exchange(strict, bytes(raw))
    if received:
        assert int(received.split()[1]) < 500, received


@pytest.mark.parametrize(
    "target", ["*", "http://elsewhere.example/health", "//health", "/health#x", "/" + "a" * 60_000]
)
def test_odd_targets_are_answered(strict: RunningService, target: str) -> None:
    raw = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received = exchange(strict, raw.encode(), shut=False)
    assert int(received.split()[1]) < 500


# --- hosts ---


def host_answer(
    service: RunningService, *lines: str, target: str = "/health", version: str = "1.1"
) -> bytes:
    head = [f"GET {target} HTTP/{version}", *lines, "Connection: close"]
    return exchange(service, "\r\n".join(head).encode("latin-1") + b"\r\n\r\n", shut=False)


@table(
    "lines",
    [
        (),
        ("Host: localhost", "Host: localhost"),
        ("Host: localhost", "HOST: evil.example"),
        ("Host:",),
        ("Host: localhost, evil.example",),
        ("Host: evil.example localhost",),
        ("Host: http://localhost",),
        ("Host: someone@localhost",),
        ("Host: localhost/",),
        ("Host: localhost:http",),
        ("Host: localhost:65536",),
        ("Host: localhost:8000:8000",),
        ("Host: ::1",),
        ("Host: [::1",),
        ("Host: [localhost]",),
        ("Host: [1:2]",),
        ("Host: b\u00fccher.example",),
        ("Host: " + "a" * 301,),
    ],
)
def test_a_request_has_one_well_formed_host(strict: RunningService, lines: tuple[str, ...]) -> None:
    received = host_answer(strict, *lines)
    assert received.split()[1] == b"400", received
    assert_refused(received)
    error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["param"]) == ("invalid_host", "Host")


def test_http_1_0_may_come_without_a_host_and_never_with_two(strict: RunningService) -> None:
    assert host_answer(strict, version="1.0").split()[1] == b"200"
    twice = ("Host: localhost", "Host: localhost")
    assert host_answer(strict, *twice, version="1.0").split()[1] == b"400"
    assert host_answer(strict, "Host: evil.example", version="1.0").split()[1] == b"421"


@table(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8000", 200), ("LocalHost:80", 200), ("localhost.", 200),
        ("localhost.:8000", 200), ("localhost:", 200), ("app.localhost", 200), ("127.0.0.1", 200),
        ("127.0.0.1:9", 200), ("127.9.9.9", 200), ("[::1]", 200), ("[::1]:8000", 200),
        ("192.0.2.7:8000", 200), ("[2001:DB8::7]", 200), ("[::ffff:127.0.0.1]", 200),
        ("evil.example", 421), ("evil.example:8000", 421), ("localhost.evil.example", 421),
        ("localhost.localdomain", 421), ("notlocalhost", 421), ("127.0.0.1.evil.example", 421),
        ("xn--bcher-kva.example", 421), ("localhost..", 421), (".localhost.evil", 421),
        ("%6cocalhost", 421), ("2130706433", 421), ("0x7f.1", 421), ("127.1", 421), ("x", 421),
    ],
)  # fmt: skip
def test_without_keys_a_host_is_a_loopback_name_or_an_address(
    strict: RunningService, host: str, status: int
) -> None:
    received = host_answer(strict, f"Host: {host}")
    assert received.split()[1] == str(status).encode(), received
    if status == 421:
        assert_refused(received)
        error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "host_not_allowed"
        assert "ALLOWED_HOSTS" in error["message"]


def test_a_refused_host_is_answered_in_its_turn(strict: RunningService) -> None:
    stranger = b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    last = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    sent = post("/generate") + stranger + post("/generate") + last
    assert answers_in(exchange(strict, sent, shut=False)) == [200, 421, 200, 200]


# --- cut off, half-closed, and all at once ---


@pytest.mark.parametrize("length", [5, 40, 70, 120])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_may_break_off_anywhere(strict: RunningService, length: int, how: str) -> None:
    with strict.connect() as made:
        made.sendall(post("/generate")[:length])
        if how == "half":
            made.shutdown(socket.SHUT_WR)
            received = read_all(made)
            if received:
                assert int(received.split()[1]) < 500
        elif how == "reset":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_client_that_closes_its_half_is_answered_or_has_left(strict: RunningService) -> None:
    """HTTP lets a server choose; either way its job ends."""
    body = b'{"prompt": "water", "max_tokens": 20}'
    received = exchange(strict, post("/generate", body=body))
    assert received == b"" or received.startswith(b"HTTP/1.1 200")
    wait_until(lambda: not strict.worker.jobs, "the job to end")


def test_requests_behind_one_another_are_answered_in_order(strict: RunningService) -> None:
    good, unknown = post("/generate"), b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    sent = good + unknown + post("/generate", body=b"{") + good + unknown + last
    assert answers_in(exchange(strict, sent, shut=False)) == [200, 404, 400, 200, 404, 200]


def test_thousands_of_requests_behind_one_another_are_answered(strict: RunningService) -> None:
    one = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with strict.connect() as made:
        writer = threading.Thread(target=made.sendall, args=(one * 2000 + last,))
        writer.start()
        received = read_all(made)
        writer.join(TIMEOUT_S)
    assert answers_in(received) == [200] * 2001


def test_garbage_behind_a_request_ends_the_connection_after_its_answer(
    strict: RunningService,
) -> None:
    received = exchange(strict, post("/generate") + b"\x00\x01garbage\r\n\r\n", shut=False)
    assert received.count(b"HTTP/1.1 ") <= 2
    assert b" 50" not in received.split(b"\r\n")[0]


def test_a_client_that_waits_for_leave_to_send_gets_it(strict: RunningService) -> None:
    head, _, body = post("/generate", "Expect: 100-continue\r\nConnection: close\r\n").partition(
        b"\r\n\r\n"
    )
    with strict.connect() as made:
        made.sendall(head + b"\r\n\r\n")
        assert made.recv(65536).startswith(b"HTTP/1.1 100")
        made.sendall(body)
        assert read_all(made).startswith(b"HTTP/1.1 200")

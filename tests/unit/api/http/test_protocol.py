"""HttpProtocol: what it uses of uvicorn, and when a client counts as stalled."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.http.uvicorn_compat import CHECKS, USES, HttpProtocol, StalledWrites

LIMIT_S = 80.0
LOOK_S = LIMIT_S / CHECKS


class FakeLoop:
    """One timer at a time, and a clock that moves when it is due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        assert self.due is None
        self.due = (self.now_s + delay_s, callback)
        return self

    def cancel(self) -> None:
        self.due = None

    def next(self) -> None:
        assert self.due is not None
        (self.now_s, callback), self.due = self.due, None
        callback()


class FakeTransport:
    def __init__(self) -> None:
        self.num_bytes = 70_000

    def get_write_buffer_size(self) -> int:
        return self.num_bytes


class Bench:
    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.loop = FakeLoop()
        self.transport = FakeTransport()
        self.num_stalls = 0
        loop: Any = self.loop
        transport: Any = self.transport
        self.writes = StalledWrites(loop, transport, limit_s, self._stalled)

    def _stalled(self) -> None:
        self.num_stalls += 1


def test_a_client_that_reads_nothing_is_reported_once_at_the_limit() -> None:
    bench = Bench()
    bench.writes.watch()
    bench.writes.watch()
    for _ in range(CHECKS - 1):
        bench.loop.next()
    assert bench.num_stalls == 0
    bench.loop.next()
    assert (bench.num_stalls, bench.loop.now_s) == (1, LIMIT_S)
    assert bench.loop.due is None


def test_every_byte_taken_begins_the_limit_again() -> None:
    bench = Bench()
    bench.writes.watch()
    for _ in range(10 * CHECKS):
        bench.loop.next()
        if bench.loop.now_s % (LIMIT_S / 2) == 0:
            bench.transport.num_bytes -= 1
    assert bench.num_stalls == 0
    for _ in range(CHECKS + 1):
        bench.loop.next()
    assert bench.num_stalls == 1


def test_a_buffer_that_only_grows_is_no_progress() -> None:
    bench = Bench()
    bench.writes.watch()
    while not bench.num_stalls:
        bench.transport.num_bytes += 10
        bench.loop.next()
    assert bench.loop.now_s == LIMIT_S


def test_an_empty_buffer_and_a_rest_end_the_watch() -> None:
    bench = Bench()
    bench.writes.watch()
    bench.transport.num_bytes = 0
    bench.loop.next()
    assert bench.loop.due is None
    bench.writes.watch()
    bench.writes.rest()
    bench.writes.rest()
    assert bench.loop.due is None


def test_without_a_limit_no_client_is_watched() -> None:
    bench = Bench(limit_s=0)
    bench.writes.watch()
    assert bench.loop.due is None


# --- what is used of uvicorn ----------------------------------------------------------------------

OVERRIDDEN = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "send_400_response": ["self", "msg"],
    "_start_asgi_task": ["self", "cycle", "app"],
    "_should_upgrade": ["self"],
}


def test_every_method_that_is_overridden_is_uvicorn_s() -> None:
    for name, parameters in OVERRIDDEN.items():
        assert list(inspect.signature(getattr(HttpToolsProtocol, name)).parameters) == parameters
    others = {name for name, made in vars(HttpProtocol).items() if inspect.isfunction(made)}
    shadowed = {name for name in others if hasattr(HttpToolsProtocol, name)}
    assert shadowed == {"__init__", *OVERRIDDEN}
    assert set(OVERRIDDEN) <= set(USES[HttpToolsProtocol])


def test_the_server_s_hooks_are_uvicorn_s() -> None:
    assert list(inspect.signature(uvicorn.Server.handle_exit).parameters) == [
        "self",
        "sig",
        "frame",
    ]
    assert list(inspect.signature(uvicorn.Server.on_tick).parameters) == ["self", "counter"]
    assert inspect.iscoroutinefunction(uvicorn.Server.on_tick)
    assert uvicorn.Server(uvicorn.Config("none")).should_exit is False


async def test_every_member_that_is_used_is_uvicorn_s() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = Config(app, http="httptools", ws="none", log_config=None)
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {})
    protocol.on_message_begin()
    assert all(hasattr(protocol, name) for name in USES[HttpToolsProtocol])
    parameters = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    cycle = RequestResponseCycle(**{**parameters, "message_event": asyncio.Event()})
    assert all(hasattr(cycle, name) for name in USES[RequestResponseCycle])
    assert cycle.chunked_encoding is None
    assert cycle.expected_content_length == 0

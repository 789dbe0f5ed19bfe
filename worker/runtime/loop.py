"""EngineLoop: takes messages, steps the engine and sends the outputs, until the process ends.

One thread, one blocking socket. Without work the loop sleeps in `recv` and a
message wakes it at once. When the service does not read, `sendall` blocks: the socket's buffer is
the bounded outbox, and a full one pauses the engine.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict

from worker.engine.errors import RequestRefused
from worker.engine.interface import EngineInterface
from worker.engine.request import EngineOutput, EngineRequest
from worker.runtime.messages import (
    AddChoices,
    AddRequest,
    CancelRequest,
    Configure,
    FromEngine,
    RequestRejected,
    Shutdown,
    StepOutputs,
    ToEngine,
    decode_to_engine,
    encode_frame,
    take_bodies,
)

STATS_INTERVAL_S = 0.05
MEASURES_INTERVAL_S = 1.0
MAX_INBOX_BYTES = 1 << 20  # read between two steps; a partial frame is always completed

log = logging.getLogger(__name__)


class LinkClosed(Exception):
    """The service is gone."""


class EngineSocket:
    """The engine's end of the link."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def send(self, message: FromEngine) -> None:
        """Sends a message; blocks while the service does not read. Raises LinkClosed."""
        try:
            self._connection.sendall(encode_frame(message))
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self, *, wait: bool) -> Iterator[ToEngine]:
        """Returns the messages that have arrived; with `wait`, at least one. Raises LinkClosed."""
        messages = list(self._parsed())
        num_bytes = 0
        while num_bytes < MAX_INBOX_BYTES:
            must_wait = bool(wait and not messages)
            if not must_wait and not self._readable.poll(0):
                break
            try:
                received = self._connection.recv(1 << 16)
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not received:
                raise LinkClosed("end of file")
            num_bytes += len(received)
            self._buffer += received
            messages.extend(self._parsed())
            if must_wait and not messages:
                num_bytes = 0
        return iter(messages)

    def _parsed(self) -> Iterator[ToEngine]:
        return map(decode_to_engine, take_bodies(self._buffer))


class EngineLoop:
    """Runs one engine for the service at the other end of the socket."""

    def __init__(self, engine: EngineInterface, link: EngineSocket) -> None:
        self._engine = engine
        self._link = link
        self._stats_at_s = float("-inf")
        self._measures_at_s = float("-inf")

    def run(self) -> None:
        """Returns after Shutdown; raises LinkClosed when the service is gone."""
        while True:
            idle = not self._engine.has_unfinished()
            if idle:
                self._send((), with_stats=True)
            for message in self._link.receive(wait=idle):
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            if self._engine.has_unfinished():
                begin_s = time.perf_counter()
                outputs = tuple(self._engine.step())
                self._engine.measures.seconds.observe(time.perf_counter() - begin_s)
                self._send(outputs)

    def _take(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(message.request)
            case AddChoices():
                for request in message.requests():
                    self._add(request)
            case CancelRequest():
                self._engine.cancel(message.request_id)
            case Configure() | Shutdown():
                raise AssertionError(f"not a message for a running engine: {type(message)}")

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except RequestRefused as refused:
            self._link.send(RequestRejected(request.request_id, refused.code, refused.message))

    def _send(self, outputs: tuple[EngineOutput, ...], *, with_stats: bool = False) -> None:
        now_s = time.monotonic()
        gave_way = () if with_stats else tuple(self._engine.measures.gave_way)
        if with_stats or now_s - self._stats_at_s >= STATS_INTERVAL_S:
            self._stats_at_s = now_s
            measures, mask_s = None, dict[str, float]()
            if with_stats or now_s - self._measures_at_s >= MEASURES_INTERVAL_S:
                self._measures_at_s = now_s
                measures = self._engine.measures.counts()
                mask_s = self._engine.measures.drain_masks()
            prefixes = self._engine.measures.drain_prefixes()
            stats = asdict(self._engine.stats())
            self._link.send(StepOutputs(outputs, stats, measures, mask_s, prefixes, gave_way))
        elif outputs or gave_way:
            self._link.send(StepOutputs(outputs, gave_way=gave_way))

"""EngineLink: the service's end of one engine process, from its start to its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from worker.runtime.interpreter import (
    EngineNotLoaded,
    check_interpreter,
    environment_of,
)
from worker.runtime.messages import (
    EXIT_RANK_LOST,
    Configure,
    EngineReady,
    FrameTooLong,
    FromEngine,
    LoadFailed,
    LoadProgress,
    Prepare,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode_frame,
    take_bodies,
)
from worker.runtime.scratch import Scratch, sweep

SOCKET_BUFFER_BYTES = 1 << 18
READ_AHEAD_BYTES = 1 << 16
STOP_GRACE_S = 0.5
EXIT_WAIT_S = 5.0

log = logging.getLogger(__name__)


class EngineDied(Exception):
    """The engine process has ended or sent invalid data; `status` is its exit status.

    `by_device`: it ended because no step could succeed in it any more, and reported it.
    `by_upstreams`: it ended because no upstream answered, and reported it.
    """

    def __init__(
        self,
        status: int | None,
        detail: str = "",
        *,
        by_device: bool = False,
        by_upstreams: bool = False,
    ) -> None:
        reason = ": a rank of the model has ended" if status == EXIT_RANK_LOST else ""
        super().__init__(detail or f"the engine process ended with status {status}{reason}")
        self.status = status
        self.by_device = by_device
        self.by_upstreams = by_upstreams


class EngineFrames(asyncio.Protocol):
    """Cuts the bytes from the engine process into message bodies.

    With READ_AHEAD_BYTES of bodies waiting, the socket is not read any more.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._bodies: deque[bytes] = deque()
        self._num_bytes = 0  # of these bodies
        self._is_paused = False
        self._end: Exception | None = None  # after the last body
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another class

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return
        self._buffer += data
        try:
            for body in take_bodies(self._buffer):
                self._bodies.append(body)
                self._num_bytes += len(body)
        except FrameTooLong as error:
            self._end = error
        if self._num_bytes > READ_AHEAD_BYTES and not self._is_paused:
            assert self._transport is not None, "data comes after the connection was made"
            self._transport.pause_reading()
            self._is_paused = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._end = self._end or error or ConnectionError("the engine process closed the socket")
        self._wake()

    async def take(self) -> bytes:
        """Returns the next body; for one task at a time.

        Raises ConnectionError or OSError after the last one, and FrameTooLong.
        """
        while not self._bodies:
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        body = self._bodies.popleft()
        self._num_bytes -= len(body)
        if self._is_paused and self._num_bytes <= READ_AHEAD_BYTES // 2:
            assert self._transport is not None, "it was paused"
            self._transport.resume_reading()
            self._is_paused = False
        return body

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineLink:
    """Frames to and from one engine process.

    A reader that stops calling `receive` pauses the engine: at most the two socket buffers and a
    few reads beyond READ_AHEAD_BYTES are between them. The data sent is bounded by the jobs in
    flight.
    """

    def __init__(
        self,
        process: Process,
        transport: asyncio.Transport,
        frames: EngineFrames,
        scratch: Scratch | None,
    ) -> None:
        """`scratch` is the engine's own folder for temporary files, removed with it."""
        self._process = process
        self._scratch = scratch
        self._transport = transport
        self._frames = frames
        self.num_received = 0  # messages

    @classmethod
    async def start(cls, first: Configure | Prepare) -> EngineLink:
        """Starts the process and sends it `first`; after Configure `ready` waits for the model.

        Raises EngineNotLoaded when the engine's own interpreter cannot run it.
        """
        version = ""
        if first.options.engine == "vllm":
            version = await check_interpreter(first.options.engine_python or sys.executable)
        for path in await asyncio.to_thread(sweep):
            log.info("removed the files of a killed engine", extra={"path": str(path)})
        env = environment_of(first.options, version)
        scratch = None
        if first.options.engine == "vllm":
            scratch = Scratch()
            env["TMPDIR"] = str(scratch.path)
        own, other = socket.socketpair()
        try:
            with other:
                for end in (own, other):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                own.setblocking(False)
                process = await asyncio.create_subprocess_exec(
                    first.options.engine_python or sys.executable,
                    "-m",
                    "worker.runtime",
                    str(other.fileno()),
                    str(os.getpid()),
                    stdin=DEVNULL,
                    pass_fds=(other.fileno(), *([scratch.fd] if scratch else [])),
                    env=env,
                    # A terminal's Ctrl-C goes to the service alone, which decides about the engine.
                    start_new_session=True,
                )
        except BaseException:  # a cancelled start has no link either, which would remove both
            own.close()
            if scratch is not None:
                scratch.close()
            raise
        loop = asyncio.get_running_loop()
        transport, frames = await loop.create_unix_connection(EngineFrames, sock=own)
        link = cls(process, transport, frames, scratch)
        link.send(first)
        return link

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, on_progress: Callable[[str, float], None]) -> EngineReady:
        """Waits until the model is loaded. Raises EngineNotLoaded or EngineDied."""
        while True:
            match await self.receive():
                case LoadProgress(stage, fraction):
                    on_progress(stage, fraction)
                case LoadFailed(message, by_settings):
                    raise EngineNotLoaded(message, by_settings=by_settings)
                case EngineReady() as ready:
                    return ready
                case other:
                    raise EngineDied(None, f"{type(other).__name__} came before EngineReady")

    async def receive(self) -> FromEngine:
        """Returns the next message. Raises EngineDied; safe to cancel between messages only."""
        try:
            message = decode_from_engine(await self._frames.take())
        except OSError:  # ConnectionError is one
            raise EngineDied(await self._exit_status()) from None
        except (msgspec.MsgspecError, FrameTooLong) as error:
            raise EngineDied(None, f"the engine process sent invalid data: {error}") from error
        self.num_received += 1
        return message

    def send(self, message: ToEngine) -> None:
        """Sends without waiting. To a dead process it is lost; `receive` then raises."""
        if not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def stop(self) -> None:
        """Ends the process by Shutdown, then by SIGKILL. Idempotent."""
        self.send(Shutdown())
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._exit_status()
        finally:
            self._transport.close()
            self._kill_session()
            if self._scratch is not None:
                # Compiled graphs may be many files.
                await asyncio.to_thread(self._scratch.close)

    def kill(self) -> None:
        """Sends SIGKILL to an engine that does not respond; `receive` then raises EngineDied."""
        if self._process.returncode is None:
            self._kill_session()

    def _kill_session(self) -> None:
        """Sends SIGKILL to the engine process and to the processes that it has started: those of
        several devices outlive it where they are loading or waiting for one another."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _exit_status(self) -> int | None:
        try:
            async with asyncio.timeout(EXIT_WAIT_S):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return None

"""EngineLink: the service's end of one engine process, from its start to its death."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable

import msgspec

from shared.settings import LogFormat, LogLevel
from worker.engine_messages import (
    HEADER,
    Configure,
    EngineOptions,
    EngineReady,
    FrameTooLong,
    FromEngine,
    LoadFailed,
    LoadProgress,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode_frame,
    frame_length,
)

SOCKET_BUFFER_BYTES = 1 << 18
READ_AHEAD_BYTES = 1 << 16
STOP_GRACE_S = 0.5
EXIT_WAIT_S = 5.0


class EngineDied(Exception):
    """The engine process has ended or cannot be understood; `status` is its exit status.

    `by_device`: it ended because no step could succeed in it any more, and reported it.
    """

    def __init__(self, status: int | None, detail: str = "", *, by_device: bool = False) -> None:
        super().__init__(detail or f"the engine process ended with status {status}")
        self.status = status
        self.by_device = by_device


class EngineNotLoaded(Exception):
    """The engine cannot be built; `by_settings` when other settings or another model would help."""

    def __init__(self, message: str, *, by_settings: bool) -> None:
        super().__init__(message)
        self.by_settings = by_settings


class EngineLink:
    """Frames to and from one engine process.

    Whoever stops calling `receive` pauses the engine: at most the two socket buffers and
    READ_AHEAD_BYTES are between them. What is sent is bounded by the jobs in flight.
    """

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.num_received = 0  # messages

    @classmethod
    async def start(
        cls, options: EngineOptions, log_level: LogLevel, log_format: LogFormat
    ) -> EngineLink:
        """Starts the process and configures it; `ready` waits for the model."""
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            ours.setblocking(False)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "worker.engine_process",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A terminal's Ctrl-C goes to the service alone, which decides about the engine.
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=READ_AHEAD_BYTES)
        link = cls(process, reader, writer)
        link.send(Configure(options, log_level.value, log_format.value))
        return link

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
        """The next message. Raises EngineDied; safe to cancel between messages only."""
        try:
            length = frame_length(await self._reader.readexactly(HEADER.size))
            message = decode_from_engine(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineDied(await self._exit_status()) from None
        except (msgspec.MsgspecError, FrameTooLong) as error:
            raise EngineDied(None, f"the engine process cannot be understood: {error}") from error
        self.num_received += 1
        return message

    def send(self, message: ToEngine) -> None:
        """Never waits. To a dead process it is lost; `receive` says so."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def stop(self) -> None:
        """Ends the process: asks, then kills. Idempotent."""
        self.send(Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
        except TimeoutError:
            self.kill()
            await self._exit_status()
        finally:
            self._writer.close()

    def kill(self) -> None:
        """SIGKILL, for an engine that does not answer; `receive` then raises EngineDied."""
        if self._process.returncode is None:
            self._process.kill()

    async def _exit_status(self) -> int | None:
        try:
            return await asyncio.wait_for(self._process.wait(), EXIT_WAIT_S)
        except TimeoutError:
            self.kill()
            return None

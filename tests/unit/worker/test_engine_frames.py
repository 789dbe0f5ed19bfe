"""What the engine process sends, however the socket cuts it, and what it may send ahead."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from worker.runtime.link import READ_AHEAD_BYTES, EngineFrames
from worker.runtime.messages import HEADER, MAX_FRAME_BYTES, FrameTooLong

Scene = Callable[[Callable[[EngineFrames, socket.socket], Awaitable[None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def play(request: pytest.FixtureRequest) -> Scene:
    """Runs a scene on either loop: the worker's is uvloop's, with transports of other classes."""

    def run(scene: Callable[[EngineFrames, socket.socket], Awaitable[None]]) -> None:
        async def opened() -> None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()
            transport, frames = await loop.create_unix_connection(EngineFrames, sock=ours)
            with theirs:
                await asyncio.wait_for(scene(frames, theirs), 30)
            transport.close()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(opened())

    return run


def frame_of(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def test_bodies_are_whole_and_in_order_however_they_were_cut(play: Scene) -> None:
    async def scene(frames: EngineFrames, theirs: socket.socket) -> None:
        bodies = [b"", b"a", b"bc" * 40, b"d"]
        stream = b"".join(map(frame_of, bodies))
        for at in range(len(stream)):
            theirs.send(stream[at : at + 1])
            await asyncio.sleep(0)
        assert [await frames.take() for _ in bodies] == bodies

    play(scene)


def test_what_came_before_the_end_is_taken_before_it_is_raised(play: Scene) -> None:
    async def scene(frames: EngineFrames, theirs: socket.socket) -> None:
        theirs.send(frame_of(b"abc") + frame_of(b"xyz")[:-2])
        theirs.close()
        assert await frames.take() == b"abc"
        with pytest.raises(ConnectionError):
            await frames.take()

    play(scene)


def test_an_oversized_frame_raises_after_earlier_frames(play: Scene) -> None:
    async def scene(frames: EngineFrames, theirs: socket.socket) -> None:
        theirs.send(frame_of(b"a") + HEADER.pack(MAX_FRAME_BYTES + 1))
        assert await frames.take() == b"a"
        with pytest.raises(FrameTooLong):
            await frames.take()

    play(scene)


def test_an_engine_whose_frames_are_not_read_pauses_until_they_are(play: Scene) -> None:
    async def scene(frames: EngineFrames, theirs: socket.socket) -> None:
        body = b"x" * 4096
        num_frames = 64 * READ_AHEAD_BYTES // len(body)
        sending = asyncio.create_task(
            asyncio.get_running_loop().sock_sendall(theirs, frame_of(body) * num_frames)
        )
        await asyncio.wait([sending], timeout=0.3)
        assert not sending.done()
        for _ in range(num_frames):
            assert await frames.take() == body
        await sending

    play(scene)

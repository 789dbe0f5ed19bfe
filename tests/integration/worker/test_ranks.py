"""The engine process and its ranks: they begin together and none outlives the others."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.logs import LogFormat, LogLevel
from shared.messages import SamplingParams
from tests.support.launched import descendants_of, is_alive
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.runtime.link import EngineDied, EngineLink, EngineNotLoaded
from worker.runtime.messages import EXIT_RANK_LOST, AddRequest, Configure, StepOutputs
from worker.settings import DEMO_CHECKPOINT

ENDS_S = 5.0  # within which all ranks end with one


def configure(size: int) -> Configure:
    options = EngineOptions(
        checkpoint=str(DEMO_CHECKPOINT),
        device="cpu",
        dtype="float32",
        num_threads=2,
        num_kv_blocks=256,
        tensor_parallel_size=size,
    )
    return Configure(options, LogLevel.INFO, LogFormat.TEXT)


@asynccontextmanager
async def started(size: int = 2) -> AsyncIterator[EngineLink]:
    link = await EngineLink.start(configure(size))
    try:
        yield link
    finally:
        link.kill()
        await link.stop()


async def busy(link: EngineLink) -> None:
    """Returns when a long request has its first tokens."""
    await link.ready(lambda stage, share: None)
    params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
    link.send(AddRequest(EngineRequest(request_id="r", prompt_token_ids=(5, 6), params=params)))
    while True:
        message = await link.receive()
        if isinstance(message, StepOutputs) and message.outputs:
            return


async def death(link: EngineLink) -> EngineDied:
    while True:
        try:
            await link.receive()
        except EngineDied as died:
            return died


async def gone(pids: list[int], begin_s: float) -> None:
    while any(map(is_alive, pids)):
        assert time.monotonic() - begin_s < ENDS_S, pids
        await asyncio.sleep(0.02)


def listeners(pid: int) -> set[str]:
    """The addresses that a process listens at, as /proc writes them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and cells[9] in inodes:
                found.add(cells[1].partition(":")[0])
    return found


async def test_ranks_are_children_that_listen_on_loopback_and_end_on_shutdown() -> None:
    async with started() as link:
        await busy(link)
        (rank,) = descendants_of(link.pid)
        loopback = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}"
        assert listeners(link.pid) | listeners(rank) <= {loopback}
        begin_s = time.monotonic()
        await link.stop()
        await gone([link.pid, rank], begin_s)


@pytest.mark.promise("Engine: tensor parallel (on CPUs; NCCL was never run)")
async def test_the_engine_ends_when_a_rank_does() -> None:
    async with started() as link:
        await busy(link)
        (rank,) = descendants_of(link.pid)
        begin_s = time.monotonic()
        os.kill(rank, signal.SIGKILL)
        died = await asyncio.wait_for(death(link), ENDS_S)
        assert died.status == EXIT_RANK_LOST
        assert "a rank of the model has ended" in str(died)
        assert not died.by_device  # a request may be at fault: its attempts are counted
        await gone([link.pid, rank], begin_s)


async def test_ranks_end_when_the_engine_is_killed_even_one_that_stands_still() -> None:
    """As the service does with an engine that makes no progress."""
    async with started() as link:
        await busy(link)
        (rank,) = descendants_of(link.pid)
        os.kill(rank, signal.SIGSTOP)
        begin_s = time.monotonic()
        link.kill()
        await death(link)
        await gone([link.pid, rank], begin_s)


async def test_a_rank_that_ends_while_it_loads_ends_the_engine() -> None:
    async with started() as link:
        while not (ranks := descendants_of(link.pid)):
            await asyncio.sleep(0.02)
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises((EngineNotLoaded, EngineDied)) as ended:
            await asyncio.wait_for(link.ready(lambda stage, share: None), 30)
        assert "rank" in str(ended.value)
        assert not getattr(ended.value, "by_settings", False)  # it is tried again
        await gone([link.pid, *ranks], time.monotonic())


async def test_a_size_that_does_not_divide_is_refused_with_a_sentence() -> None:
    async with started(3) as link:
        with pytest.raises(
            EngineNotLoaded, match=r"PENSTOCK_TENSOR_PARALLEL_SIZE=3 does not"
        ) as refused:
            await link.ready(lambda stage, share: None)
        assert refused.value.by_settings

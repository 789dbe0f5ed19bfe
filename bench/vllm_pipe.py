"""vLLM's engine at the other end of a pipe: the least that can stand between it and a client.

`bare`: an LLMEngine with vLLM's own sampler. `sampler`: a VllmEngine, which is the same one with
this project's admission and sampler. Both have the arguments that ENGINE=vllm gives them. What a
service takes besides is the cost of HTTP, the queue and the events.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from bench.workloads import Seen, Send, Work, clock
from shared.cores import available_cores
from tests.support.vllm_environment import vllm_python
from worker.engine_options import EngineOptions
from worker.runtime.interpreter import environment_of

KINDS = ("bare", "sampler")
PROGRAM = Path(__file__).with_name("vllm_pipe_process.py")
LINE_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def vllm_pipe(kind: str, values: Mapping[str, object]) -> AsyncIterator[tuple[Send, int]]:
    """Starts an engine with EngineOptions of `values`; yields a sender and the process's id."""
    python = vllm_python()
    if python is None:
        sys.exit("no interpreter with vLLM: set PENSTOCK_VLLM_PYTHON")
    options = EngineOptions(checkpoint="", engine="vllm", engine_python=python)
    env = environment_of(options) or {}
    env |= {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", str(available_cores()))}
    process = await asyncio.create_subprocess_exec(
        *(python, str(PROGRAM), kind, msgspec.json.encode(dict(values)).decode()),
        stdin=PIPE,
        stdout=PIPE,
        env=env,
        limit=LINE_BYTES,
    )
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():  # one line when it is ready
            raise RuntimeError(f"the engine did not start: status {await process.wait()}")
        pipe = _Pipe(process)
        reading = asyncio.create_task(pipe.read())
        yield pipe.send, process.pid
        reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _Pipe:
    """Requests under way in one engine."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self._ids = itertools.count()
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._seen: dict[int, Seen] = {}

    async def send(self, work: Work, seen: Seen) -> None:
        """Sends one request and notes when its tokens come. Raises RuntimeError if it fails."""
        number = next(self._ids)
        self._seen[number] = seen
        self._ends[number] = asyncio.get_running_loop().create_future()
        seen.start_s = clock()
        self._in.write(msgspec.json.encode([number, work.prompt, work.max_tokens]) + b"\n")
        await self._ends[number]
        seen.end_s = clock()

    async def read(self) -> None:
        """Reads what each step gave; ends when the engine does."""
        while line := await self._out.readline():
            now_s = clock()
            for number, num_tokens, is_last in msgspec.json.decode(line):
                seen = self._seen[number]
                if num_tokens:
                    seen.times.append(now_s)
                    seen.num_out += num_tokens
                if is_last:
                    self._ends[number].set_result(None)
        for end in self._ends.values():
            if not end.done():
                end.set_exception(RuntimeError("the engine has ended"))

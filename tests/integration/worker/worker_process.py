"""A real worker process over a real server, and what a frontend would see of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from shared.keys import new_job_id
from shared.messages import (
    START,
    Cursor,
    Delta,
    Failed,
    Finished,
    Job,
    JobState,
    OnDisconnect,
    PromptSlice,
    SamplingParams,
)
from shared.process import dying_with_this_process
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.jobs import JobStore, Submitted, TransportError
from tests.support.forked import ForkedPopen
from tests.support.throttle import FAULTS
from tests.support.variables import with_prefix

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60.0


class WorkerProcess:
    """`python -m worker` with the echo runner, by default; logs go to a file."""

    def __init__(
        self,
        log_path: Path,
        redis_url: str,
        namespace: str,
        *,
        pass_fds: Sequence[int] = (),
        **settings: object,
    ) -> None:
        given = {
            "REDIS_URL": redis_url,
            "NAMESPACE": namespace,
            "RUNNER": "echo",
            "LOG_FORMAT": "text",
            "OMP_NUM_THREADS": "1",
            "LEASE_MS": "2000",
            "BEAT_INTERVAL_MS": "200",
            "DRAIN_TIMEOUT_S": "60",
            "PYTHONPATH": f"{FAULTS}{os.pathsep}{ROOT}",
            **settings,
        }
        env = os.environ | with_prefix(given)
        self.log_path = log_path
        self._log: IO[bytes] = log_path.open("wb")
        self._process = ForkedPopen(
            [sys.executable, "-m", "worker"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=dying_with_this_process(signal.SIGKILL),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def engine_pids(self) -> list[int]:
        """Its living children."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except FileNotFoundError:
            return []
        return [int(pid) for pid in children.split()]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ready(self) -> WorkerProcess:
        await until(lambda: " ready " in self.log or not self.alive, "the worker to be ready")
        assert self.alive, self.log
        return self

    async def ended(self) -> int:
        """Its exit status."""
        await until(lambda: not self.alive, "the worker to end")
        return self._process.wait()

    def close(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._log.close()


class Frontend:
    """Submits jobs and follows their logs."""

    def __init__(self, store: JobStore, model: str) -> None:
        self.store = store
        self.model = model

    async def submit(
        self,
        prompt: Sequence[int],
        *,
        timeout_ms: int = 60_000,
        num_choices: int = 1,
        **sampling: object,
    ) -> str:
        """The job's id."""
        params = SamplingParams(
            **({"max_tokens": 20, "seed": 1, "temperature": 0.0} | sampling)  # type: ignore[arg-type]
        )
        job = Job(
            job_id=new_job_id(),
            model=self.model,
            prompt_token_ids=tuple(prompt),
            sampling=params,
            kind="generate",
            timeout_ms=timeout_ms,
            on_disconnect=OnDisconnect.CONTINUE,
            num_choices=num_choices,
        )
        assert (await self.store.submit(job, AdmissionLimits(), "f1")).outcome is Submitted.ACCEPTED
        return job.job_id

    async def result(self, job_id: str) -> Result:
        """Waits for the end; checks that the log has neither gap nor overlap nor a second end."""
        result = Result()
        deadline_s = time.monotonic() + TIMEOUT_S
        while result.end is None:
            assert time.monotonic() < deadline_s, await self.store.get(job_id)
            try:
                result.read(await self.store.read_log(job_id, result.cursor))
            except TransportError:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.005)
        return result

    async def num_tokens(self, job_id: str, at_least: int) -> None:
        """Returns when so many tokens are in the log."""
        deadline_s = time.monotonic() + TIMEOUT_S
        result = Result()
        while result.cursor.num_tokens < at_least:
            assert time.monotonic() < deadline_s, await self.store.get(job_id)
            result.read(await self.store.read_log(job_id, result.cursor))
            await asyncio.sleep(0.005)

    async def state(self, job_id: str) -> JobState:
        record = await self.store.get(job_id)
        assert record is not None
        return record.state


class Result:
    """What a log says, in order."""

    def __init__(self) -> None:
        self.cursor: Cursor = START
        self.token_ids: list[int] = []
        self.text = ""
        self.deltas: list[Delta] = []
        self.end: Finished | Failed | None = None

    def read(self, events: Sequence[object]) -> None:
        for event in events:
            assert self.end is None, "something came after the end"
            if isinstance(event, Delta):
                assert event.start == self.cursor, "a gap or an overlap"
                self.cursor = event.end
                self.token_ids += event.token_ids
                self.text += event.text
                self.deltas.append(event)
            elif isinstance(event, PromptSlice):
                assert self.cursor == START, "the prompt comes first"
            else:
                assert isinstance(event, Finished | Failed)
                self.end = event
        assert len(self.token_ids) == self.cursor.num_tokens
        assert len(self.text.encode()) == self.cursor.num_bytes

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def failed(self) -> Failed:
        assert isinstance(self.end, Failed), self.end
        return self.end


def echo(prompt: Sequence[int], count: int) -> list[int]:
    """What the echo runner says to it."""
    return [prompt[i % len(prompt)] for i in range(count)]


async def until(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        await asyncio.sleep(0.01)

"""EngineSupervisor over scripted engine processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from shared.logs import LogFormat, LogLevel
from shared.messages import FinishReason
from shared.transport.ports.queue import CrashCause
from tests.support.polling import until
from tests.unit.worker.fakes import make_job
from tests.unit.worker.runner_bench import Bench
from tests.unit.worker.test_admission_estimator import ready
from worker.engine.request import EngineOutput
from worker.engine_options import EngineOptions
from worker.running_jobs import RunningJob, request_id_of
from worker.runtime import supervisor as supervisor_module
from worker.runtime.link import EngineDied
from worker.runtime.messages import Configure, EngineReady, StepOutputs
from worker.runtime.supervisor import EngineGaveUp, EngineSupervisor

CONFIGURE = Configure(EngineOptions(checkpoint="/m"), LogLevel.INFO, LogFormat.TEXT)


class ScriptedLink:
    """An engine process that loads at once, sends `messages` and lives until `dies` is set."""

    pid = 1
    num_received = 0

    def __init__(self, messages: Sequence[Any] = ()) -> None:
        self.dies = asyncio.Event()
        self.messages = list(messages)

    async def ready(self, on_progress: Callable[[str, float], None]) -> EngineReady:
        return ready(10)

    async def receive(self) -> Any:
        if self.messages:
            return self.messages.pop(0)
        await self.dies.wait()
        raise EngineDied(1)

    async def stop(self) -> None: ...


class Starts:
    """Stands for EngineLink: a link for each start, but for those in `failures`."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.failures = failures
        self.links: list[ScriptedLink] = []
        self.devices: list[str] = []  # that each was configured with
        self.num_calls = 0

    async def start(self, configure: Configure) -> ScriptedLink:
        self.num_calls += 1
        self.devices.append(configure.options.device)
        if self.num_calls in self.failures:
            raise self.failures[self.num_calls]
        self.links.append(ScriptedLink())
        return self.links[-1]


def supervisor(max_restarts: int) -> EngineSupervisor:
    return EngineSupervisor(
        CONFIGURE,
        lambda: False,
        load_timeout_s=5,
        stall_limit_s=60,
        max_restarts=max_restarts,
    )


async def serve(supervisor: EngineSupervisor, causes: list[CrashCause]) -> None:
    async def on_death(cause: CrashCause) -> None:
        causes.append(cause)

    has_capacity = asyncio.Event()
    has_capacity.set()
    await supervisor.serve(lambda message: None, on_death, has_capacity)


async def test_a_process_that_cannot_be_spawned_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = Starts({2: BlockingIOError(11, "Resource temporarily unavailable")})
    monkeypatch.setattr(supervisor_module, "EngineLink", starts)
    engine, causes = supervisor(max_restarts=5), list[CrashCause]()
    await engine.start()
    serving = asyncio.create_task(serve(engine, causes))
    try:
        starts.links[0].dies.set()
        await until(lambda: len(starts.links) == 2 or serving.done())
        await until(lambda: engine.up.is_set() or serving.done())
        assert not serving.done()
        assert (engine.num_restarts, causes) == (2, [CrashCause.ENGINE])
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def test_processes_that_can_never_be_spawned_end_the_worker_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = OSError(12, "Cannot allocate memory")
    starts = Starts({2: failure, 3: failure})
    monkeypatch.setattr(supervisor_module, "EngineLink", starts)
    engine, causes = supervisor(max_restarts=2), list[CrashCause]()
    await engine.start()
    starts.links[0].dies.set()
    with pytest.raises(EngineGaveUp, match="Cannot allocate memory"):
        await asyncio.wait_for(serve(engine, causes), 10)
    assert starts.num_calls == 3


@pytest.mark.parametrize("chosen", ["cuda", "cpu"])
async def test_a_successor_has_the_device_that_the_first_engine_chose(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the GPU is lost, `auto` would now be the CPU."""
    starts = Starts({})
    loaded = msgspec.structs.replace(ready(10), device=chosen)
    monkeypatch.setattr(ScriptedLink, "ready", lambda *_: asyncio.sleep(0, loaded))
    monkeypatch.setattr(supervisor_module, "EngineLink", starts)
    engine = supervisor(max_restarts=5)
    await engine.start()
    serving = asyncio.create_task(serve(engine, []))
    try:
        starts.links[0].dies.set()
        await until(lambda: len(starts.devices) == 2 or serving.done())
        assert starts.devices == ["auto", chosen]
    finally:
        serving.cancel()
        await asyncio.wait([serving])


JOBS = {"0-a": b"abc", "0-b": b"d", "0-c": b"efgh"}


def _messages() -> list[Any]:
    """A message for each token, of the jobs in turn; the last one of a job carries its end."""
    messages: list[Any] = []
    for i in range(max(map(len, JOBS.values()))):
        for job_id, text in JOBS.items():
            if i < len(text):
                end = FinishReason.LENGTH if i == len(text) - 1 else None
                output = EngineOutput(request_id_of(job_id, 1, 0), (text[i],), finish_reason=end)
                messages.append(StepOutputs((output,)))
    return messages


@pytest.mark.parametrize("num_received", range(len(_messages()) + 1))
async def test_after_a_death_at_any_message_each_job_has_ended_or_is_handed_back(
    num_received: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts({})
    monkeypatch.setattr(supervisor_module, "EngineLink", starts)
    bench, engine = Bench(), supervisor(max_restarts=5)
    await engine.start()
    starts.links[0].messages = _messages()[:num_received]
    starts.links[0].dies.set()
    for job_id in JOBS:
        bench.admit(make_job(job_id))
    handed_back: list[RunningJob] = []

    async def on_death(cause: CrashCause) -> None:
        handed_back.extend(bench.runner.take_from_engine())

    serving = asyncio.create_task(
        engine.serve(bench.runner.take, on_death, bench.publisher.has_capacity)
    )
    try:
        await until(lambda: engine.num_restarts == 1 and engine.up.is_set())
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    received = [message.outputs[0] for message in _messages()[:num_received]]
    ended = {o.request_id.partition("/")[0] for o in received if o.finish_reason is not None}
    assert {running.job.job_id for running in handed_back} == JOBS.keys() - ended
    assert bench.jobs.ids == ended  # they wait for the store
    assert bench.jobs.num_in_engine == 0
    for job_id in ended:
        text, _, end = await bench.log_of(job_id)
        assert (text.encode(), end and end.reason) == (JOBS[job_id], "length")
    assert len(bench.jobs) == 0

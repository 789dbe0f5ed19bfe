"""Jobs of several choices whose workers die at any time: every answer is that of a calm run.

The engine is the real one over a runner whose tokens follow from seed and position; the log is a
list that takes whatever was flushed when the worker died.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any, cast

import pytest

from shared.choice_deltas import ChoiceDelta, segment_deltas
from shared.messages import START, Cursor, Delta, Job
from shared.metrics import MetricsNames
from shared.tracing import Tracing
from shared.transport.deliveries import segments_of
from shared.transport.ports.queue import Append, Delivery, JobEnd
from tests.unit.worker.fakes import EOS, VOCAB_SIZE, make_job
from tests.unit.worker.runner_bench import MODEL
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.ports import StepResult
from worker.job_runner import JobRunner
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox
from worker.running_jobs import RunningJobs
from worker.runtime.messages import (
    AddChoices,
    AddRequest,
    CancelRequest,
    StepOutputs,
    ToEngine,
)
from worker.traces import JobTraces

LETTERS = "abcdEN é😀".encode()


class SeededRunner:
    """The token after i outputs is a function of the seed and i; now and then it is the EOS."""

    vocab_size = VOCAB_SIZE

    def launch(self, batch: ScheduledBatch) -> SeededRunner:
        self._batch = batch
        return self

    def collect(self) -> StepResult:
        sampled = [sequence for sequence in self._batch.sequences if sequence.samples]
        return StepResult({sequence.seq_id: self._token(sequence) for sequence in sampled})

    def _token(self, sequence: ScheduledSequence) -> int:
        rng = random.Random(f"{sequence.params.seed}/{sequence.output_index}")
        return EOS if rng.random() < 0.02 else rng.choice(LETTERS)


class Log:
    """What is durable of one job, over all attempts."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.attempt = 0
        self.deltas: list[Delta] = []
        self.chain = ""
        self.end: JobEnd | None = None

    def append(self, item: Append) -> None:
        assert self.end is None, "something came after the end"
        assert item.delta.start == self.cursor
        assert item.start_hash == self.chain
        if item.delta.end != item.delta.start:
            self.deltas.append(item.delta)
            self.chain = item.end_hash
        self.end = item.end_of_job

    @property
    def cursor(self) -> Cursor:
        return self.deltas[-1].end if self.deltas else START

    def delivery(self) -> Delivery:
        """To the next claimer."""
        self.attempt += 1
        return Delivery(
            self.job,
            self.attempt,
            tuple(token_id for delta in self.deltas for token_id in delta.token_ids),
            (),
            self.cursor,
            segments=segments_of(self.deltas) if self.deltas else None,
            logged=tuple(self.deltas),
        )

    def choices(self) -> dict[int, ChoiceDelta]:
        parts: dict[int, list[ChoiceDelta]] = defaultdict(list)
        for delta in self.deltas:
            for part in segment_deltas(delta):
                parts[part.choice].append(part)
        for own in parts.values():
            assert all(part.finish_reason is None for part in own[:-1]), "it ended before"
        return {
            choice: own[-1]._replace(
                token_ids=tuple(token_id for part in own for token_id in part.token_ids),
                text="".join(part.text for part in own),
            )
            for choice, own in sorted(parts.items())
        }


class Attempt:
    """One worker's life with the job: JobRunner, engine and an Outbox that is flushed by hand."""

    def __init__(self, log: Log, engine: EngineConfig) -> None:
        self._log = log
        self._engine = Engine(engine, cast(Any, SeededRunner()))
        self._outbox: Outbox | None = None
        self.jobs = RunningJobs(8)
        metrics = WorkerMetrics("m", "w1", MetricsNames.PENSTOCK)
        self._runner = JobRunner(
            self.jobs,
            MODEL,
            cast(Any, self),
            self._send,
            metrics,
            JobTraces(Tracing(), "w1"),
        )
        self._runner.admit(log.delivery())

    def step(self) -> None:
        outputs = tuple(self._engine.step())
        self._engine.check_integrity()
        self._runner.take(StepOutputs(outputs))

    def flush(self) -> None:
        assert self._outbox is not None
        if self._outbox.has_something:
            self._log.append(self._outbox.next_append())
            self._outbox.accept()

    def assert_idle(self) -> None:
        stats = self._engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_blocks == stats.total_blocks
        assert self.jobs.num_in_engine == 0

    # What the JobRunner asks of its Publisher.

    def open(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def notice(self, outbox: Outbox) -> None: ...

    def _send(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._engine.add(message.request)
            case AddChoices():
                for request in message.requests():
                    self._engine.add(request)
            case CancelRequest(request_id):
                self._engine.cancel(request_id)


def run(job: Job, rng: random.Random | None, **engine: int) -> Log:
    """To its end. With an `rng` workers die: between any two flushes, with what was not flushed."""
    config = EngineConfig(
        num_blocks=64, block_size=4, max_num_seqs=4, eos_token_ids=frozenset({EOS}), **engine
    )
    log = Log(job)
    while log.end is None:
        attempt = Attempt(log, config)
        while log.end is None and not (rng and rng.random() < 0.08):
            if attempt.jobs.num_in_engine:
                attempt.step()
            if rng is None or rng.random() < 0.5:
                attempt.flush()
        if log.end is not None:
            attempt.assert_idle()
    return log


@pytest.mark.parametrize("seed", range(40))
def test_every_resumed_choice_equals_the_uninterrupted_run(seed: int) -> None:
    rng = random.Random(seed)
    job = make_job(
        prompt=[rng.randrange(256) for _ in range(rng.randint(1, 20))],
        num_choices=rng.randint(1, 6),
        seed=seed,
        max_tokens=rng.randint(1, 40),
        min_tokens=0,
        stop=rng.choice(((), ("EN",), ("a", "bc"))),
        stop_token_ids=rng.choice(((), (ord("d"),))),
    )
    calm, hurt = run(job, None), run(job, rng, max_num_batched_tokens=8)
    assert hurt.choices() == calm.choices()
    assert list(calm.choices()) == list(range(job.num_choices))
    assert calm.end is not None
    assert hurt.end is not None
    assert (hurt.end.state, hurt.end.reason) == (calm.end.state, calm.end.reason)
    assert hurt.end.usage.completion_tokens == calm.end.usage.completion_tokens
    assert hurt.cursor == calm.cursor
    if job.num_choices > 1:
        ends = {choice.finish_reason for choice in calm.choices().values()}
        assert (calm.end.reason == "length") == ("length" in ends)

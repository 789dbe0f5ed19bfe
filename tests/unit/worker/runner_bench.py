"""A JobRunner on a bench: the test is its engine, and its log is a list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.messages import Cursor, ErrorCode, FinishReason, Job
from shared.metrics import MetricsNames
from shared.text.model_card import ModelCard
from shared.tracing import Tracing
from shared.transport.ports.queue import Delivery, JobEnd
from tests.unit.worker.fakes import EOS, VOCAB_SIZE, ByteTokenizer, FakeQueue
from worker.checkpoint import LoadedModel
from worker.engine.request import EngineOutput
from worker.job_runner import JobRunner
from worker.metrics import WorkerMetrics
from worker.publisher import FlushPolicy, Publisher
from worker.running_jobs import RunningJobs, request_id_of
from worker.runtime.messages import StepOutputs, ToEngine
from worker.traces import JobTraces

MODEL = LoadedModel(
    name="m",
    card=ModelCard(
        name="m",
        created_s=0,
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        has_chat_template=False,
        tokenizer_digest="",
        facts_digest="",
    ),
    blobs={},
    tokenizer=ByteTokenizer(),
    max_model_len=64,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({EOS}),
    adapters={"ann": "digest"},
)


class Bench:
    """A runner whose engine is the test: it sees what was sent and says what it likes."""

    def __init__(self) -> None:
        self.queue = FakeQueue()
        self.jobs = RunningJobs(4)
        self.sent: list[ToEngine] = []
        self.publisher = Publisher(
            self.queue,
            "w1",
            5000,
            FlushPolicy(flush_interval_s=0, flush_tokens=8, max_unflushed_tokens=256),
            on_settled=lambda settled: self.runner.settle(settled),
            on_rejected=lambda job_id, attempt: self.runner.stop_engine_work(job_id, attempt),
            on_trouble=lambda: None,
            on_published=lambda lag_s: None,
            on_put_off=lambda job_id, attempt: None,
        )
        self.metrics = WorkerMetrics("m", "w1", MetricsNames.PENSTOCK)
        self.runner = JobRunner(
            self.jobs,
            MODEL,
            self.publisher,
            self.sent.append,
            self.metrics,
            JobTraces(Tracing(), "w1"),
        )

    def admit(self, job: Job, attempt: int = 1, logged: str = "", cached: int = 0) -> str:
        token_ids = tuple(logged.encode())
        end = Cursor(len(token_ids), len(token_ids))
        self.runner.admit(Delivery(job, attempt, token_ids, (), end, cached))
        return request_id_of(job.job_id, attempt, 0)

    def says(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        finish: FinishReason | None = None,
        *,
        stop: int | None = None,
        error: ErrorCode | None = None,
        cached: int = 0,
    ) -> None:
        output = EngineOutput(request_id, tuple(token_ids), None, finish, stop, error, "m", cached)
        self.runner.take(StepOutputs((output,)))

    async def log_of(self, job_id: str) -> tuple[str, tuple[int, ...], JobEnd | None]:
        """(text, tokens, end) of what is durable once nothing waits any more."""
        task = asyncio.create_task(self.publisher.run())
        await self.publisher.flushed()
        task.cancel()
        await asyncio.wait([task])
        items = [item for step in self.queue.appended for item in step if item.job_id == job_id]
        text = "".join(item.delta.text for item in items)
        token_ids = tuple(token for item in items for token in item.delta.token_ids)
        return text, token_ids, items[-1].end_of_job if items else None

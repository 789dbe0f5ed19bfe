"""A worker without an engine: it speaks the real JobQueue, and repeats the prompt's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.messages import (
    START,
    FinishReason,
    JobState,
    Segment,
    TokenLogprob,
    Usage,
)
from shared.tasks import cancel_and_wait
from shared.text.detokenizer import StopStringMatcher
from shared.text.model_card import ModelCard, TextModel
from shared.text.text_model import load_text
from shared.transport.connect import RedisTransport
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import AppendStatus, Delivery, JobEnd, WorkerReport
from tests.support.jobs import Stream

LEASE_MS = 10_000
BEAT_INTERVAL_S = 0.1
PULL_BLOCK_MS = 50
PARKED_S = 0.01  # between looks at a script that lets it do nothing

Result = TypeVar("Result")


@dataclass
class Script:
    """How the worker behaves; a test may change it at any time."""

    step_s: float = 0.0
    tokens_per_step: int = 1
    pulls: bool = True  # takes jobs from the queue
    starts: bool = True  # makes tokens for jobs it took
    stop_after: int | None = None  # makes no more tokens after so many
    end: JobEnd | None = None  # says this instead of going on, after `stop_after` tokens
    stalled: bool = False
    cached_tokens: int = 0  # of each prompt
    says: Sequence[int] = ()  # in place of the prompt's tokens; an end token belongs to it


class RunningJob(Stream):
    def __init__(self, delivery: Delivery) -> None:
        super().__init__(delivery)
        self.delivery = delivery
        self.token_ids = list(delivery.output_token_ids)


class ScriptedWorker:
    """Pulls, repeats the prompt's tokens, appends, ends."""

    def __init__(self, transport: RedisTransport, card: ModelCard, blobs: dict[str, bytes]) -> None:
        self.script = Script()
        self.worker_id = "w-scripted"
        self.is_parked = False  # no pull is on its way
        self.seen: list[Delivery] = []
        self.dropped: list[tuple[str, AppendStatus, int]] = []  # job id, why, tokens made
        self.jobs: dict[str, RunningJob] = {}
        self._transport = transport
        self._card = card
        self._blobs = blobs
        self._text: TextModel = load_text(card, blobs)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        queue = self._transport.queue
        await queue.setup([self._card.name])
        await queue.announce(self._card.name, self._card.to_json(), self._blobs)
        self._start(self._heartbeat())
        while True:
            self.is_parked = not self.script.pulls
            if self.is_parked:
                await asyncio.sleep(PARKED_S)
                continue
            self._take(await _until_it_works(queue.pull, self.worker_id, 16, PULL_BLOCK_MS))

    async def recover(self) -> None:
        """Takes up the jobs that no live worker holds any more."""
        self._take(await self._transport.queue.recover(self.worker_id, 16))

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Ends `run`, then everything it started."""
        await cancel_and_wait(running)
        await cancel_and_wait(*self._tasks)

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self.seen.append(delivery)
            self._start(self._serve(delivery))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _heartbeat(self) -> None:
        step = 0
        while True:
            step += 1
            running = [(job_id, job.delivery.attempt) for job_id, job in self.jobs.items()]
            decoding = sum(bool(job.token_ids) for job in self.jobs.values())
            stats: dict[str, float | str] = {
                "step": step,
                "waiting": 0,
                "prefilling": len(running) - decoding,
                "active": decoding,
                "pending": 0,
                "running": len(running),
            }
            report = WorkerReport(
                self.worker_id,
                LEASE_MS,
                (self._card.name,),
                stats,
                running,
                stalled=self.script.stalled,
            )
            reply = await _until_it_works(self._transport.queue.heartbeat, report)
            for job_id in (*reply.dropped, *reply.lost):
                self.jobs.pop(job_id, None)
            await asyncio.sleep(BEAT_INTERVAL_S)

    async def _serve(self, delivery: Delivery) -> None:
        job = RunningJob(delivery)
        self.jobs[delivery.job.job_id] = job
        try:
            while not self.script.starts and self._has(job):
                await asyncio.sleep(PARKED_S)
            await self._generate(job)
        finally:
            if self._has(job):
                del self.jobs[job.job_id]

    def _has(self, job: RunningJob) -> bool:
        """Whether this attempt of the job is still the worker's."""
        return self.jobs.get(job.job_id) is job

    async def _generate(self, job: RunningJob) -> None:
        sampling = job.delivery.job.sampling
        prompt = self.script.says or job.delivery.job.prompt_token_ids
        detokenizer = self._text.tokenizer.detokenizer()
        matcher = StopStringMatcher(sampling.stop)
        while self._has(job):
            end = self._scripted_end(job)
            fresh: list[int] = []
            texts: list[str] = []  # of each of them
            stop = None
            while end is None and len(fresh) < self.script.tokens_per_step:
                token = prompt[len(job.token_ids + fresh) % len(prompt)]
                fresh.append(token)
                num_tokens = len(job.token_ids) + len(fresh)
                is_stop = token in sampling.stop_token_ids or (
                    token in self._card.eos_token_ids and not sampling.ignore_eos
                )
                if not is_stop:
                    piece, stop = matcher.push(detokenizer.push((token,)))
                else:
                    piece = ""
                texts.append(piece)
                if is_stop or stop is not None:
                    reason = token if token in sampling.stop_token_ids else stop
                    end = self._finished(job, FinishReason.STOP, num_tokens, reason)
                elif num_tokens >= sampling.max_tokens:
                    end = self._finished(job, FinishReason.LENGTH, num_tokens, None)
            if end is not None and stop is None:
                piece, _ = matcher.push(detokenizer.flush())
                texts[-1:] = ["".join((*texts[-1:], piece, matcher.flush()))]
            if not await self._append(job, fresh, texts, end) or end is not None:
                return
            await asyncio.sleep(self.script.step_s)

    def _scripted_end(self, job: RunningJob) -> JobEnd | None:
        limit = self.script.stop_after
        if limit is None or len(job.token_ids) < limit:
            return None
        return self.script.end

    def _finished(
        self, job: RunningJob, reason: FinishReason, num_tokens: int, stop: str | int | None
    ) -> JobEnd:
        prompt_tokens = len(job.delivery.job.prompt_token_ids)
        usage = Usage(prompt_tokens, num_tokens, min(self.script.cached_tokens, prompt_tokens))
        return JobEnd(JobState.FINISHED, reason, usage, stop)

    async def _append(
        self, job: RunningJob, fresh: Sequence[int], texts: Sequence[str], end: JobEnd | None
    ) -> bool:
        """Says tokens, of which each gave one of the texts; as a worker does, piece by piece."""
        limit = self.script.stop_after
        if end is None and limit is not None and len(job.token_ids) >= limit:
            await asyncio.sleep(0.01)
            return True
        cached = self.script.cached_tokens if job.cursor == START else None
        segments = None
        if len(fresh) > 1:
            segments = tuple(Segment(0, 1, len(piece.encode())) for piece in texts)
        append = job.append(
            fresh, "".join(texts), end, self._logprobs(job, fresh), segments, cached_tokens=cached
        )
        job.accept(append)
        job.token_ids.extend(fresh)
        (result,) = await _until_it_works(
            self._transport.queue.append, self.worker_id, LEASE_MS, [append]
        )
        if result.status is not AppendStatus.OK:
            self.dropped.append((job.job_id, result.status, len(job.token_ids)))
        return result.status is AppendStatus.OK

    def _logprobs(self, job: RunningJob, fresh: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        num_top = job.delivery.job.sampling.logprobs
        if num_top is None:
            return None
        return tuple(
            TokenLogprob(token, -0.5, tuple((token + k, -0.5 - k) for k in range(num_top)))
            for token in fresh
        )


async def _until_it_works(call: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
    """Every call of a queue is safe to repeat."""
    while True:
        try:
            return await call(*arguments)
        except TransportError:
            await asyncio.sleep(0.05)

"""A stage for tests: the real app on a real socket, and a worker that follows a script.

Both live on an event loop in a thread of their own, so that a test may use blocking clients. The
worker speaks the real JobQueue; its "model" repeats the prompt's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from api.http.server import make_server
from api.main import create_app
from api.settings import ApiSettings
from shared.messages import Cursor, Delta, FinishReason, JobState, Segment, TokenLogprob, Usage
from shared.tasks import cancel_and_wait
from shared.text.detokenizer import StopStringMatcher
from shared.text.model_card import ModelCard, TextModel, card_from_checkpoint, load_text
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.queue import Append, AppendStatus, Beat, Delivery, JobEnd
from shared.transport.wire import chain_hash
from tests.support.checkpoints import make_checkpoint

MODEL = "penstock/tiny"
MAX_MODEL_LEN = 512
LEASE_MS = 10_000

Result = TypeVar("Result")


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Polls until `condition` holds; fails with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


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


@dataclass
class RunningJob:
    delivery: Delivery
    token_ids: list[int] = field(default_factory=list)
    num_bytes: int = 0
    chain: str = ""


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
        self._start(self._beat())
        while True:
            self.is_parked = not self.script.pulls
            if self.is_parked:
                await asyncio.sleep(0.005)
                continue
            for delivery in await _until_it_works(queue.pull, self.worker_id, 16, 20):
                self.seen.append(delivery)
                self._start(self._serve(delivery))

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Ends `run`, then everything it started."""
        await cancel_and_wait(running)
        await cancel_and_wait(*self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
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
            beat = Beat(
                self.worker_id,
                LEASE_MS,
                (self._card.name,),
                stats,
                running,
                stalled=self.script.stalled,
            )
            reply = await _until_it_works(self._transport.queue.beat, beat)
            for job_id in (*reply.dropped, *reply.lost):
                self.jobs.pop(job_id, None)
            await asyncio.sleep(0.05)

    async def _serve(self, delivery: Delivery) -> None:
        job = RunningJob(delivery)
        self.jobs[delivery.job.job_id] = job
        try:
            while not self.script.starts and delivery.job.job_id in self.jobs:
                await asyncio.sleep(0.005)
            await self._generate(job)
        finally:
            self.jobs.pop(delivery.job.job_id, None)

    async def _generate(self, job: RunningJob) -> None:
        sampling = job.delivery.job.sampling
        prompt = job.delivery.job.prompt_token_ids
        detokenizer = self._text.tokenizer.detokenizer()
        matcher = StopStringMatcher(sampling.stop)
        while job.delivery.job.job_id in self.jobs:
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
        usage = Usage(len(job.delivery.job.prompt_token_ids), num_tokens)
        return JobEnd(JobState.FINISHED, reason, usage, stop)

    async def _append(
        self, job: RunningJob, fresh: Sequence[int], texts: Sequence[str], end: JobEnd | None
    ) -> bool:
        """Says tokens, of which each gave one of the texts; as a worker does, piece by piece."""
        limit = self.script.stop_after
        if end is None and limit is not None and len(job.token_ids) >= limit:
            await asyncio.sleep(0.01)
            return True
        start, text, segments = Cursor(len(job.token_ids), job.num_bytes), "".join(texts), None
        if len(fresh) > 1:
            segments = tuple(Segment(0, 1, len(piece.encode())) for piece in texts)
        job.num_bytes += len(text.encode())
        job.token_ids.extend(fresh)
        chain = chain_hash(job.chain, fresh)
        delta = Delta(
            start=start,
            end=Cursor(len(job.token_ids), job.num_bytes),
            token_ids=tuple(fresh),
            text=text,
            logprobs=self._logprobs(job, fresh),
            segments=segments,
        )
        job_id, attempt = job.delivery.job.job_id, job.delivery.attempt
        append = Append(job_id, attempt, delta, job.chain, chain, end)
        job.chain = chain
        (result,) = await _until_it_works(
            self._transport.queue.append, self.worker_id, LEASE_MS, [append]
        )
        if result.status is not AppendStatus.OK:
            self.dropped.append((job_id, result.status, len(job.token_ids)))
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


class Stage:
    """A running app (and worker). `call` runs a coroutine on their loop."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        checkpoint: Path,
        *,
        with_worker: bool,
        **settings: Any,
    ) -> None:
        self._checkpoint = checkpoint
        self._with_worker = with_worker
        self.settings = ApiSettings(
            redis_url=redis_url,
            namespace=namespace,
            port=0,
            health_interval_s=0.05,
            **settings,
        )
        self.loop = asyncio.new_event_loop()
        self.worker: ScriptedWorker
        self.transport: RedisTransport
        self.text: TextModel
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(30), "the stage did not start"
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        if self._thread.is_alive():
            waiting = [task.get_stack() for task in asyncio.all_tasks(self.loop)]
            raise AssertionError(f"the stage did not stop: {waiting}")

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    @property
    def script(self) -> Script:
        return self.worker.script

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._main())
        except BaseException as error:
            self._failure = error
            self._started.set()
            raise
        finally:
            self.loop.close()

    async def _main(self) -> None:
        self.app = create_app(self.settings)
        self.server = make_server(self.app, self.settings)
        self.transport = await open_transport(
            self.settings.redis_url, namespace=self.settings.namespace
        )
        card, blobs = card_from_checkpoint(
            self._checkpoint,
            name=MODEL,
            max_model_len=MAX_MODEL_LEN,
            kv_capacity_tokens=4096,
            dtype="float32",
            num_parameters=1,
        )
        self.card = card
        self.text = load_text(card, blobs)
        self.worker = ScriptedWorker(self.transport, card, blobs)
        tasks = [asyncio.create_task(self.server.serve())]
        if self._with_worker:
            tasks.append(asyncio.create_task(self.worker.run()))
        try:
            while not self.server.started:
                await asyncio.sleep(0.01)
            port = self.server.servers[0].sockets[0].getsockname()[1]
            self.base_url = f"http://127.0.0.1:{port}"
            self._started.set()
            await self._stop.wait()
        finally:
            self.app.state.open_requests.cut_all()
            self.server.should_exit = True
            for running in tasks[1:]:
                await self.worker.stop(running)
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.transport.aclose()


def make_tiny_checkpoint(directory: Path) -> Path:
    """Files that the worker's card and text come from."""
    return make_checkpoint(directory / "tiny")


@contextlib.contextmanager
def staged(
    redis_url: str, namespace: str, checkpoint: Path, *, with_worker: bool = True, **settings: Any
) -> Iterator[Stage]:
    """A stage that is ready (where it has a worker), and stopped afterwards."""
    stage = Stage(redis_url, namespace, checkpoint, with_worker=with_worker, **settings)
    stage.start()
    try:
        if with_worker:
            wait_until(lambda: httpx.get(f"{stage.base_url}/ready").status_code == 200, "readiness")
        yield stage
    finally:
        stage.stop()

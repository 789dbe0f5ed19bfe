"""What prefix affinity gains and costs, in virtual time: the machine's load decides nothing.

    python -m bench.simulated_affinity --workers 4 --loads 0.5 0.8 0.95 --seeds 1 2 3

Runs the queue's own transitions (shared/transport/lua) on a private Redis, with the simulation's
clock in place of the server's and simulated workers around them, for each number of workers and
each load with PENSTOCK_AFFINITY_WAIT_MS at its default and at 0. Turns arrive as a Poisson process,
each of a conversation that has none in flight, as in bench.prefix_affinity. A worker computes
PREFILL_MS_PER_TOKEN for each token that it has not cached and --step-ms for each of the output; a
call of the queue takes it CALL_MS. With --stall-ms a tenth of a worker's calls comes up to that
much later, as where it has no core. Prints a JSON line for each number, load and wait, with the
figures of all --seeds together.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from penstock.launcher.redis_server import PrivateServer
from shared.messages import FinishReason, JobState, Usage
from shared.prefixes import DIGEST_BYTES, PREFIX_STEP, digests_of_prompt
from shared.redis.connections import BLOCK_MS
from shared.redis.pubsub import Subscriber
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.job_queue import RedisJobQueue
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.queue import Delivery, JobEnd, WorkerReport
from shared.transport.pulls import AFFINITY_MS, LATE_MS, POLL_S
from shared.transport.scripts import Scripts, load_sources
from tests.support.jobs import MODEL, Stream, make_job

TURNS, FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 6, 200, 60, 30
PREFILL_MS_PER_TOKEN, CALL_MS, REPORT_MS = 0.1, 0.3, 50.0
STALLED = 0.1
CLOCK = "clock_ms"  # a key
# Code of the transitions that reads the server's clock, and its like for the simulation's.
CLOCKS = {
    "redis.call('TIME')": f"{{0, redis.call('GET', '{CLOCK}') * 1000}}",
    "redis.call('XADD', queue, '*', 'v',": "redis.call('XADD', queue, "
    "string.format('%.0f-*', server_ms()), 'v',",
}
FAR_MS = 10**9
LIMITS = AdmissionLimits(max_queued_jobs=10**6, max_queue_share_per_tenant=1.0)
END = JobEnd(JobState.FINISHED, FinishReason.STOP, Usage(1, 1, 0))


def _sources_of_simulated_time(**options: bool) -> dict[str, str]:
    sources = dict(load_sources(**options))
    for real, simulated in CLOCKS.items():
        assert any(real in source for source in sources.values()), f"no transition has {real}"
        sources = {name: source.replace(real, simulated) for name, source in sources.items()}
    return sources


@dataclass
class Conversation:
    token_ids: list[int]
    turn: int = 0


@dataclass
class Worker:
    worker_id: str
    queue: RedisJobQueue
    free_slots: int
    waits: bool = False  # in the server, for an entry
    asked: int = 0  # so far: a later time of an earlier wait is void
    cached: dict[int, int] = field(default_factory=dict)  # conversation -> tokens


class Simulation:
    """One run: virtual time in ms, a heap of what happens next."""

    def __init__(
        self, arguments: argparse.Namespace, num_workers: int, load: float, seed: int
    ) -> None:
        self._arguments = arguments
        self._num_workers = num_workers
        self._rng = random.Random(seed)
        self._arrivals = random.Random(seed)  # the same with any wait
        self._stalls = random.Random(seed)
        self._now_ms = 1e12
        self._events: list[tuple[float, int, Callable[..., Awaitable[None]], tuple[Any, ...]]] = []
        self._order = itertools.count()
        num_slots = num_workers * arguments.slots
        self._per_ms = load * num_slots / (OUTPUT_TOKENS * arguments.step_ms)
        self._conversations = [self._conversation() for _ in range(2 * num_slots)]
        self._idle = list(range(2 * num_slots))
        self._workers: list[Worker] = []
        self._submitted_ms: dict[str, tuple[float, int]] = {}
        self._num_left = arguments.jobs
        self.waits_ms: list[float] = []
        self.later_tokens = self.cached_tokens = 0

    async def run(self, affinity_ms: int) -> None:
        server = PrivateServer()
        with (
            mock.patch("time.time", self._now_s),
            mock.patch("shared.transport.scripts.load_sources", _sources_of_simulated_time),
        ):
            transport = await open_transport(server.start(), namespace="simulated")
            try:
                await self._run(transport, affinity_ms)
            finally:
                await transport.aclose()
                server.stop()

    async def _run(self, transport: RedisTransport, affinity_ms: int) -> None:
        self._store = transport.store
        redis: Any = transport.connections.commands
        await redis.set(CLOCK, int(self._now_ms))
        for number in range(self._num_workers):
            connections = transport.connections
            queue = RedisJobQueue(
                transport.keys,
                connections,
                Scripts(transport.keys, FAR_MS),
                Subscriber(connections.new_pubsub),
                affinity_ms=affinity_ms,
            )
            worker = Worker(f"w{number}", queue, self._arguments.slots)
            await queue.setup([MODEL])
            self._workers.append(worker)
            await self._heartbeat(worker)
            self._at(0.0, self._ask, worker, 0)
        self._at(100.0, self._arrive)
        while self._events and (self._num_left or self._submitted_ms):
            self._now_ms, _, act, arguments = heapq.heappop(self._events)
            await redis.set(CLOCK, int(self._now_ms))
            await act(*arguments)

    def _now_s(self) -> float:
        return self._now_ms / 1000

    def _at(self, after_ms: float, act: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        event = (self._now_ms + after_ms, next(self._order), act, arguments)
        heapq.heappush(self._events, event)

    def _conversation(self) -> Conversation:
        return Conversation(self._tokens(FIRST_TOKENS))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(100, 4000) for _ in range(count)]

    async def _heartbeat(self, worker: Worker) -> None:
        await worker.queue.heartbeat(WorkerReport(worker.worker_id, FAR_MS, (MODEL,), {}, ()))
        self._at(1000.0, self._heartbeat, worker)

    async def _arrive(self) -> None:
        if not self._num_left:
            return
        self._num_left -= 1
        self._at(self._arrivals.expovariate(self._per_ms), self._arrive)
        if not self._idle:  # overloaded
            self._idle.append(len(self._conversations))
            self._conversations.append(self._conversation())
        number = self._idle.pop(self._rng.randrange(len(self._idle)))
        if self._conversations[number].turn == TURNS:
            self._conversations[number] = self._conversation()
            for worker in self._workers:
                worker.cached.pop(number, None)
        job = make_job(prompt=self._conversations[number].token_ids)
        self._submitted_ms[job.job_id] = (self._now_ms, number)
        await self._store.submit(job, LIMITS, "")
        waiting = [worker for worker in self._workers if worker.waits]
        for place, worker in enumerate(sorted(waiting, key=lambda one: one.asked)):
            self._ask_after(place * CALL_MS, worker)

    def _ask_after(self, after_ms: float, worker: Worker) -> None:
        worker.waits = False
        worker.asked = next(self._order)
        if self._arguments.stall_ms and self._stalls.random() < STALLED:
            after_ms += self._stalls.random() * self._arguments.stall_ms
        self._at(after_ms + CALL_MS, self._ask, worker, worker.asked)

    async def _ask(self, worker: Worker, asked: int) -> None:
        if asked != worker.asked:
            return
        pulled = await worker.queue.pulls._pull_once(worker.worker_id, worker.free_slots)
        for delivery in await worker.queue._reader.deliveries(worker.worker_id, pulled.claims):
            self._start(worker, delivery)
        if not worker.free_slots:
            return
        if pulled.claims or pulled.more:
            self._ask_after(CALL_MS, worker)  # `recover` comes first
            return
        waits_ms = [float(BLOCK_MS)]
        if pulled.deferred_ms:
            waits_ms += [pulled.deferred_ms, POLL_S * 1000]
        if pulled.left_ms:
            waits_ms.append(pulled.left_ms)
        worker.waits = True
        self._at(min(waits_ms) + LATE_MS, self._stop_waiting, worker, worker.asked)

    async def _stop_waiting(self, worker: Worker, asked: int) -> None:
        if worker.waits and worker.asked == asked:
            self._ask_after(0.0, worker)

    def _start(self, worker: Worker, delivery: Delivery) -> None:
        worker.free_slots -= 1
        submitted_ms, number = self._submitted_ms[delivery.job.job_id]
        self.waits_ms.append(self._now_ms - submitted_ms)
        length = len(delivery.job.prompt_token_ids)
        cached = worker.cached.get(number, 0) // 16 * 16
        if self._conversations[number].turn:
            self.later_tokens += length
            self.cached_tokens += cached
        worker.cached[number] = max(length, cached)
        compute_ms = (length - cached) * PREFILL_MS_PER_TOKEN
        self._at(compute_ms + REPORT_MS, self._report, worker, delivery.job.prompt_token_ids)
        compute_ms += OUTPUT_TOKENS * self._arguments.step_ms
        self._at(compute_ms, self._end, worker, delivery, number)

    async def _report(self, worker: Worker, token_ids: tuple[int, ...]) -> None:
        steps = len(token_ids) // PREFIX_STEP * PREFIX_STEP
        held: set[bytes] = set()
        for end in range(PREFIX_STEP, steps + 1, PREFIX_STEP):
            joined = digests_of_prompt(make_job().tenant, token_ids[:end])
            held |= {joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)}
        await worker.queue.note_prefixes(worker.worker_id, FAR_MS, sorted(held), (), is_first=False)

    async def _end(self, worker: Worker, delivery: Delivery, number: int) -> None:
        del self._submitted_ms[delivery.job.job_id]
        append = Stream(delivery).append([5], "a", end=END)
        await worker.queue.append(worker.worker_id, FAR_MS, [append])
        conversation = self._conversations[number]
        conversation.turn += 1
        conversation.token_ids += self._tokens(OUTPUT_TOKENS)
        worker.cached[number] = len(conversation.token_ids)
        self._at(REPORT_MS, self._report, worker, tuple(conversation.token_ids))
        conversation.token_ids += self._tokens(NEW_TOKENS)
        self._idle.append(number)
        worker.free_slots += 1
        if worker.free_slots == 1:
            self._ask_after(0.0, worker)


def summary(runs: Sequence[Simulation]) -> dict[str, Any]:
    """Returns the figures of several runs, as of one."""
    waits = sorted(itertools.chain.from_iterable(run.waits_ms for run in runs))
    later = sum(run.later_tokens for run in runs)
    return {
        "jobs": len(waits),
        "cached_later": round(sum(run.cached_tokens for run in runs) / max(1, later), 3),
        "wait_ms_p50": round(waits[len(waits) // 2], 1),
        "wait_ms_p99": round(waits[len(waits) * 99 // 100], 1),
        "wait_ms_mean": round(sum(waits) / len(waits), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8, 0.95])
    parser.add_argument("--slots", type=int, default=16, help="of each worker")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--stall-ms", type=float, default=0.0)
    parser.add_argument("--affinity-ms", type=int, nargs="+", default=[AFFINITY_MS, 0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    for num_workers in arguments.workers:
        for load in arguments.loads:
            for affinity_ms in arguments.affinity_ms:
                runs = [Simulation(arguments, num_workers, load, seed) for seed in arguments.seeds]
                for run in runs:
                    asyncio.run(run.run(affinity_ms))
                place = {"workers": num_workers, "load": load, "affinity_ms": affinity_ms}
                print(json.dumps(place | summary(runs)), flush=True)


if __name__ == "__main__":
    main()

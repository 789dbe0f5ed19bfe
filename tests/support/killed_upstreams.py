"""Jobs for workers with upstreams and one with our engine, on one queue, while all are killed.

Everything is in float32: each job has the tokens of LLM in this process, whatever computed them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shared.messages import SamplingParams
from shared.transport.connect import RedisTransport
from tests.integration.worker.job_frontend import Frontend
from tests.support.service_processes import MODEL, WorkerProcess, worker_process
from tests.support.vllm_worker import own_settings
from worker.llm import LLM
from worker.settings import DEMO_CHECKPOINT

NUM_PROMPTS, MAX_TOKENS = 16, 80
LEAST_MARGIN = 0.02  # between the best two tokens: less may fall either way (0.003 did)
SERVED = {"RUNNER": "model", "LEASE_MS": "2000", "BEAT_INTERVAL_MS": "200"}

Expected = dict[tuple[int, ...], list[int]]


def clear_prompts() -> Expected:
    """Returns prompts with their greedy tokens: long outputs, in which no two tokens are nearly as
    good."""
    llm = LLM(str(DEMO_CHECKPOINT), dtype="float32", device="cpu", max_model_len=512)
    draw = random.Random(7)
    prompts = [
        [draw.randrange(300, 4000) for _ in range(draw.randrange(4, 60))]
        for _ in range(25 * NUM_PROMPTS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    found = {}
    for prompt, result in zip(prompts, llm.generate(prompts, params, progress=False), strict=True):
        tops = [[value for _, value in entry.top] for entry in result.logprobs or ()]
        is_clear = min(best - second for best, second in tops) > LEAST_MARGIN
        if is_clear and len(result.token_ids) == MAX_TOKENS:
            found[tuple(prompt)] = list(result.token_ids)
    assert len(found) >= NUM_PROMPTS
    return dict(itertools.islice(found.items(), NUM_PROMPTS))


class Workers:
    """Two workers of the upstreams and one of our own engine, each killed and started again."""

    def __init__(
        self, redis_url: str, namespace: str, urls: Sequence[str], num_slots: int, logs: Path
    ) -> None:
        self._given = (redis_url, namespace, DEMO_CHECKPOINT)
        http = {"ENGINE": "http", "UPSTREAM_URLS": ", ".join(urls), "MAX_NUM_SEQS": str(num_slots)}
        settings = [{**http, **SERVED}, {**http, **SERVED}, own_settings(**SERVED)]
        self._settings, self._logs, self._numbers = settings, logs, itertools.count()
        self.stacks = [ExitStack() for _ in settings]
        self.live = [self._start(number) for number in range(len(settings))]

    def _start(self, number: int) -> WorkerProcess:
        log = self._logs / f"worker{number}-{next(self._numbers)}"
        opened = worker_process(*self._given, log, **self._settings[number])
        return self.stacks[number].enter_context(opened)

    def replace(self, number: int) -> WorkerProcess:
        self.live[number].kill()
        self.live[number] = self._start(number)
        return self.live[number]


@contextmanager
def workers(
    redis_url: str, namespace: str, urls: Sequence[str], num_slots: int, logs: Path
) -> Iterator[Workers]:
    made = Workers(redis_url, namespace, urls, num_slots, logs)
    try:
        yield made
    finally:
        for stack in made.stacks:
            stack.close()


async def check_jobs(
    transport: RedisTransport,
    expected: Expected,
    kill_all: Callable[[], Awaitable[None]],
    *,
    num_jobs: int,
    num_clients: int,
) -> None:
    """Runs at least `num_jobs` until `kill_all` returns; AssertionError for a job that has other
    tokens, and where none was continued by another worker."""
    frontend, prompts = Frontend(transport.store, MODEL), itertools.cycle(expected)
    killed = asyncio.Event()
    num_resumed = 0

    async def follow() -> int:
        nonlocal num_resumed
        num_done = 0
        while not (killed.is_set() and num_done >= num_jobs / num_clients):
            prompt = next(prompts)
            job_id = await frontend.submit(list(prompt), max_tokens=MAX_TOKENS)
            result = await frontend.result(job_id)
            assert result.finished.reason == "length"
            assert result.token_ids == expected[prompt]
            record = await transport.store.get(job_id)
            assert record is not None
            num_resumed += len(record.claims) > 1
            num_done += 1
        return num_done

    async def kill() -> None:
        await kill_all()
        killed.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(kill())
        clients = [group.create_task(follow()) for _ in range(num_clients)]
    assert sum(client.result() for client in clients) >= num_jobs
    assert num_resumed > 0

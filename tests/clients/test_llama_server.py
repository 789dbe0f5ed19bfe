"""PENSTOCK_ENGINE=http in front of llama.cpp's server, beside our own engine on one queue.

Everything is in float32: each job has the tokens of LLM in this process, whoever computed them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from shared.messages import SamplingParams
from shared.process import dying_with_this_process
from shared.transport.connect import RedisTransport, open_transport
from tests.integration.worker.job_frontend import Frontend
from tests.support.launched import free_port
from tests.support.pinned_environment import pinned_environment
from tests.support.polling import until
from tests.support.redis_server import new_namespace
from tests.support.service_processes import MODEL, WorkerProcess, worker_process
from tests.support.vllm_worker import own_settings
from worker.llm import LLM
from worker.settings import DEMO_CHECKPOINT

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]

HERE = Path(__file__).parent / "llama_server"
READY_TIMEOUT_S = 120.0
NUM_SLOTS = 6  # of each server
NUM_JOBS, NUM_KILLS, NUM_CLIENTS = 200, 40, 24
NUM_PROMPTS, MAX_TOKENS = 16, 80
LEAST_MARGIN = 0.02  # between the best two tokens: less may fall either way (0.003 did)
SERVED = {"RUNNER": "model", "LEASE_MS": "2000", "BEAT_INTERVAL_MS": "200"}


class LlamaServer:
    """llama.cpp's server of a file, on one port over its restarts."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log, self._port = model, log, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        python = pinned_environment(HERE / "requirements.txt", "llama-server", sees_ours=True)
        command = [python / "bin/python", HERE / "serve.py", self._model]
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                [*map(str, command), str(self._port), str(NUM_SLOTS)],
                stdout=log,
                stderr=log,
                preexec_fn=dying_with_this_process(signal.SIGKILL),
            )

    async def ready(self) -> None:
        async with httpx.AsyncClient() as client:

            async def answers() -> bool:
                with suppress(httpx.TransportError):
                    return (await client.get(f"{self.url}/health")).status_code == 200
                assert self._popen.poll() is None, self._log.read_text()[-2000:]
                return False

            await until(answers, "llama.cpp's server", READY_TIMEOUT_S)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    python = pinned_environment(HERE / "requirements.txt", "llama-server", sees_ours=True)
    command = [python / "bin/python", HERE / "make_gguf.py", DEMO_CHECKPOINT, file]
    subprocess.run(list(map(str, command)), check=True, timeout=READY_TIMEOUT_S)
    return file


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """Prompts with their greedy tokens: long outputs, in which no two tokens are nearly as good."""
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


@asynccontextmanager
async def upstreams(gguf: Path, directory: Path) -> AsyncIterator[Sequence[LlamaServer]]:
    servers = [LlamaServer(gguf, directory / f"llama{number}") for number in range(2)]
    try:
        for server in servers:
            await server.ready()
        yield servers
    finally:
        for server in servers:
            server.kill()


class Workers:
    """Two workers of the upstreams and one of our own engine, each killed and started again."""

    def __init__(self, redis_url: str, namespace: str, urls: Sequence[str], logs: Path) -> None:
        self._given = (redis_url, namespace, DEMO_CHECKPOINT)
        http = {"ENGINE": "http", "UPSTREAM_URLS": ", ".join(urls), "MAX_NUM_SEQS": str(NUM_SLOTS)}
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
def workers(redis_url: str, namespace: str, urls: Sequence[str], logs: Path) -> Iterator[Workers]:
    made = Workers(redis_url, namespace, urls, logs)
    try:
        yield made
    finally:
        for stack in made.stacks:
            stack.close()


@pytest.mark.promise(
    "Models: in front of llama.cpp's server, and beside our own engine on one queue, 200 jobs "
    "under 40 kills of servers and workers each end once with the right tokens"
)
async def test_no_job_is_lost_doubled_or_wrong_while_servers_and_workers_are_killed(
    redis_url: str, tmp_path: Path, gguf: Path, expected: dict[tuple[int, ...], list[int]]
) -> None:
    namespace = new_namespace()
    async with upstreams(gguf, tmp_path) as servers:
        urls = [server.url for server in servers]
        async with aclosing(await open_transport(redis_url, namespace=namespace)) as transport:
            with workers(redis_url, namespace, urls, tmp_path) as serving:
                for worker in serving.live:
                    await worker.ready()
                await check_all(transport, servers, serving, expected)


async def check_all(
    transport: RedisTransport,
    servers: Sequence[LlamaServer],
    serving: Workers,
    expected: dict[tuple[int, ...], list[int]],
) -> None:
    frontend, prompts = Frontend(transport.store, MODEL), itertools.cycle(expected)
    killed = asyncio.Event()
    num_resumed = 0

    async def follow() -> int:
        """Runs one job after the other until enough have run and enough was killed."""
        nonlocal num_resumed
        num_jobs = 0
        while not (killed.is_set() and num_jobs >= NUM_JOBS / NUM_CLIENTS):
            prompt = next(prompts)
            job_id = await frontend.submit(list(prompt), max_tokens=MAX_TOKENS)
            result = await frontend.result(job_id)
            assert result.finished.reason == "length"
            assert result.token_ids == expected[prompt]
            record = await transport.store.get(job_id)
            assert record is not None
            num_resumed += len(record.claims) > 1
            num_jobs += 1
        return num_jobs

    async def kill() -> None:
        """Kills one after the other; the one that was killed serves again before the next."""
        order = itertools.cycle([0, 1, 0, 1, 2])
        of_workers = itertools.cycle(range(len(serving.live)))
        for number in itertools.islice(order, NUM_KILLS):
            if number == 2:
                await serving.replace(next(of_workers)).ready()
            else:
                servers[number].kill()
                servers[number].start()
                await servers[number].ready()
            await asyncio.sleep(0.3)  # for a few tokens
        killed.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(kill())
        clients = [group.create_task(follow()) for _ in range(NUM_CLIENTS)]
    assert sum(client.result() for client in clients) >= NUM_JOBS
    assert num_resumed > 0

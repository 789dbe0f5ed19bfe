"""PENSTOCK_ENGINE=http in front of llama.cpp's server, beside our own engine on one queue."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from shared.transport.connect import open_transport
from tests.support.killed_upstreams import Expected, check_jobs, clear_prompts, workers
from tests.support.launched import Launched
from tests.support.llama_server import LlamaServer, demo_gguf
from tests.support.redis_server import new_namespace
from worker.settings import DEMO_CHECKPOINT

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]

NUM_SLOTS = 6  # of each server
NUM_JOBS, NUM_KILLS, NUM_CLIENTS = 200, 40, 24
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "kind": {"enum": ["queue", "engine"]}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def expected() -> Expected:
    return clear_prompts()


@asynccontextmanager
async def upstreams(gguf: Path, directory: Path) -> AsyncIterator[Sequence[LlamaServer]]:
    logs = [directory / f"llama{number}" for number in range(2)]
    servers = [LlamaServer(gguf, log, NUM_SLOTS) for log in logs]
    try:
        for server in servers:
            await server.ready()
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.mark.promise(
    "Models: in front of llama.cpp's server, and beside our own engine on one queue, 200 jobs "
    "under 40 kills of servers and workers each end once with the right tokens"
)
async def test_no_job_is_lost_doubled_or_wrong_while_servers_and_workers_are_killed(
    redis_url: str, tmp_path: Path, gguf: Path, expected: Expected
) -> None:
    namespace = new_namespace()
    async with upstreams(gguf, tmp_path) as servers:
        urls = [server.url for server in servers]
        async with aclosing(await open_transport(redis_url, namespace=namespace)) as transport:
            with workers(redis_url, namespace, urls, NUM_SLOTS, tmp_path) as serving:

                async def kill_all() -> None:
                    """Kills one after the other; it serves again before the next."""
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

                for worker in serving.live:
                    await worker.ready()
                await check_jobs(
                    transport, expected, kill_all, num_jobs=NUM_JOBS, num_clients=NUM_CLIENTS
                )


async def test_schemas_are_kept_cached_tokens_are_the_servers_and_a_regex_is_refused(
    tmp_path: Path, gguf: Path
) -> None:
    server = LlamaServer(gguf, tmp_path / "llama", NUM_SLOTS)
    try:
        await server.ready()
        settings = {"MODEL": str(DEMO_CHECKPOINT), "SERVED_MODEL_NAME": "demo", "ENGINE": "http"}
        with Launched(tmp_path, {**settings, "UPSTREAM_URLS": server.url}) as penstock:
            async with httpx.AsyncClient(base_url=penstock.base_url, timeout=60) as client:

                async def answer(**more: object) -> httpx.Response:
                    messages = [{"role": "user", "content": "What is Penstock?"}]
                    body = {"model": "demo", "messages": messages, "temperature": 0, **more}
                    return await client.post("/v1/chat/completions", json=body)

                shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
                found = (await answer(response_format=shape)).json()
                value = json.loads(found["choices"][0]["message"]["content"])
                assert value.keys() == {"sure", "kind"}
                again = (await answer(max_tokens=4)).json()["usage"]
                cached = again["prompt_tokens_details"]["cached_tokens"]
                assert 0 < cached < again["prompt_tokens"]
                card = (await client.get("/v1/models/demo")).json()
                assert card["exact_resume"] is False
                job = (await client.get(f"/v1/jobs/{found['id']}")).json()
                assert job["exact_resume"] is False
                sampled = [await answer(temperature=1, seed=5, max_tokens=8) for _ in range(2)]
                texts = [each.json()["choices"][0]["message"]["content"] for each in sampled]
                assert texts[0] == texts[1]
                refused = await answer(structured_outputs={"regex": "a+"})
                assert refused.status_code >= 400
                assert "llama.cpp cannot keep an answer to a regular" in refused.text
    finally:
        server.kill()

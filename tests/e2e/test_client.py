"""penstock.client against a service whose processes are killed: text and tokens are those of a
calm run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client import AsyncClient, Client, Stream
from tests.support.launched import REPOSITORY, Launched, free_port
from tests.support.listener import listener_on
from tests.support.polling import wait_until
from tests.support.service_client import ServiceClient
from tests.support.service_fixtures import *  # noqa: F403
from tests.support.service_fixtures import two_frontends
from tests.support.throttle import Throttle

PROMPT = "First Citizen: 😀 héllo "
TOKENS: dict[str, Any] = {"model": "penstock-demo", "max_tokens": 80, "ignore_eos": True}


penstock = two_frontends


@pytest.fixture
def urls(penstock: Launched) -> list[str]:
    return [f"http://127.0.0.1:{penstock.port + place}" for place in range(2)]


@pytest.fixture
def client(urls: list[str]) -> Iterator[Client]:
    with Client(urls) as made:
        yield made


def begun(client: Client, dialect: str) -> Stream:
    if dialect == "generate":
        return client.generate(PROMPT, **TOKENS)
    if dialect == "chat":
        return client.chat(PROMPT, return_token_ids=True, **TOKENS)
    return client.complete(PROMPT, return_token_ids=True, **TOKENS)


def kill_frontend(client: Client) -> None:
    os.kill(listener_on(client.url), signal.SIGKILL)


def kill_worker(penstock: Launched) -> None:
    with ServiceClient(penstock) as service:
        os.kill(service.pid_of("worker"), signal.SIGKILL)


@pytest.mark.parametrize("dialect", ["chat", "completion", "generate"])
@pytest.mark.parametrize("victim", ["frontend", "worker"])
def test_a_killed_process_is_not_noticed_by_the_reader(
    penstock: Launched,
    urls: list[str],
    client: Client,
    throttle: Throttle,
    dialect: str,
    victim: str,
) -> None:
    calm = begun(client, dialect).result()
    throttle.apply(15)
    with begun(client, dialect) as stream:
        deltas, is_broken = [], False
        for delta in stream:
            deltas.append(delta)
            if not is_broken and sum(len(had.token_ids) for had in deltas) >= 10:
                is_broken = True
                if victim == "frontend":
                    kill_frontend(client)
                else:
                    kill_worker(penstock)
                throttle.release()
    assert "".join(delta.text for delta in deltas) == calm.text
    read = tuple(token for delta in deltas for token in delta.token_ids)
    assert read == calm.choices[0].token_ids
    assert len(read) == 80
    assert stream.answer.choices == calm.choices
    job = client.job(stream.job_id)
    assert (job["status"], job["attempt"]) == ("finished", 2 if victim == "worker" else 1)
    wait_until(lambda: is_whole(urls), "the successor", 60)


def is_whole(urls: list[str]) -> bool:
    """Whether both frontends answer and the worker lives."""
    for url in urls:
        with Client(url, patience_s=20.0) as one:
            if len(one.call("GET", "/health")["workers"]) != 1:
                return False
    return True


def test_many_streams_of_asyncio_pass_over_a_killed_frontend(
    urls: list[str], client: Client, throttle: Throttle
) -> None:
    calm = begun(client, "generate").result()
    throttle.apply(10)

    async def read(asked: AsyncClient, reached: asyncio.Barrier) -> tuple[int, ...]:
        async with asked.generate(PROMPT, **TOKENS) as stream:
            tokens: list[int] = []
            has_waited = False
            async for delta in stream:
                tokens += delta.token_ids
                if not has_waited and len(tokens) >= 5:
                    has_waited = True
                    await reached.wait()
            return tuple(tokens)

    async def read_all() -> list[tuple[int, ...]]:
        reached = asyncio.Barrier(13)
        async with AsyncClient(urls) as asked:
            readers = [asyncio.create_task(read(asked, reached)) for _ in range(12)]
            await reached.wait()
            os.kill(listener_on(asked.url), signal.SIGKILL)
            throttle.release()
            return await asyncio.gather(*readers)

    assert set(asyncio.run(read_all())) == {calm.choices[0].token_ids}
    wait_until(lambda: is_whole(urls), "the successor", 60)


@pytest.mark.promise("Client: a job in the background is picked up by any process")
def test_a_background_job_is_picked_up_by_another_process(
    urls: list[str], client: Client, throttle: Throttle
) -> None:
    throttle.apply(10)
    options = {"model": "penstock-demo", "max_output_tokens": 60, "ignore_eos": True}
    name = client.submit(PROMPT, **options)
    code = (
        "import sys; from penstock.client import Client; "
        "print(Client(sys.argv[1].split(',')).follow(sys.argv[2]).result().text, end='')"
    )
    words = [sys.executable, "-c", code, ",".join([f"http://127.0.0.1:{free_port()}", *urls]), name]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as other:
        wait_until(lambda: client.job(name)["usage"]["completion_tokens"] >= 10, "tokens", 60)
        throttle.release()
        out, _ = other.communicate(timeout=60)
    assert other.returncode == 0
    assert out == client.follow(name).result().text
    assert len(out) > 60

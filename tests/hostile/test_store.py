"""One tenant fills the job store with what it may send; another's requests are all served."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import redis
from openai import OpenAI

from api.auth.keys import digest_of
from penstock.launcher.redis_server import PrivateServer
from tests.support.running_service import MODEL, RunningService, running_service
from tests.support.service_fixtures import checkpoint

__all__ = ["checkpoint"]

MEGABYTE = 2**20
MAX_MEMORY = 32 * MEGABYTE
MOST_REQUESTS = 3000  # far more than fill the store
KEYS = {tenant: f"sk-penstock-{tenant}" for tenant in ("hostile", "innocent", "other")}


class Filled(NamedTuple):
    running: RunningService
    redis_url: str


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Filled]:
    server = PrivateServer()
    url = server.start()
    redis.Redis.from_url(url).config_set("maxmemory", MAX_MEMORY)
    keys = ";".join(f"{digest_of(key)} tenant={tenant}" for tenant, key in KEYS.items())
    files_dir = str(tmp_path_factory.mktemp("files"))
    settings = {"api_keys": keys, "files_dir": files_dir, "max_open_batches_per_tenant": 1000}
    with running_service(url, "hostile", checkpoint, **settings) as running:
        yield Filled(running, url)
    server.stop()


def client_of(service: Filled, tenant: str) -> OpenAI:
    return OpenAI(
        base_url=f"{service.running.base_url}/v1", api_key=KEYS[tenant], max_retries=0, timeout=120
    )


def failed_batches(client: OpenAI) -> Callable[[], Any]:
    """Each failed batch keeps the messages of its rows, which repeat a long name."""
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}, "😀" * 300: 1}
    lines = "\n".join([json.dumps(row)] * 100).encode()
    file_id = client.files.create(file=("rows.jsonl", lines), purpose="batch").id
    return lambda: client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )


def stored_responses(client: OpenAI) -> Callable[[], Any]:
    """Each keeps its instructions and unused tools for an hour."""
    count = itertools.count()

    def send() -> Any:
        # Another text each time: equal ones are stored once.
        described = f"{next(count)} " * 130_000
        tools: Any = [{"type": "function", "name": "f", "description": described, "parameters": {}}]
        return client.responses.create(
            model=MODEL, input="a", tools=tools, tool_choice="none", max_output_tokens=1
        )

    return send


@pytest.mark.parametrize("attack", [failed_batches, stored_responses])
def test_a_tenant_that_fills_the_store_is_refused_and_others_are_served(
    service: Filled, attack: Callable[[OpenAI], Callable[[], Any]]
) -> None:
    hostile = client_of(service, "hostile")
    send, num_refused, statuses = attack(hostile), 0, set[int]()
    for _ in range(MOST_REQUESTS):
        try:
            send()
        except openai.APIStatusError as error:
            statuses.add(error.status_code)
            num_refused += error.code in ("tenant_share_exceeded", "store_full")
            time.sleep(0.05)  # or too much of it waits
        if num_refused == 5:
            break
    assert num_refused == 5
    assert statuses <= {429, 503}
    with redis.Redis.from_url(service.redis_url) as store:
        used = store.info("memory")["used_memory"]
    assert MAX_MEMORY / 4 < used < MAX_MEMORY * 0.9  # the reserve is left
    for tenant in ("innocent", "other"):
        client = client_of(service, tenant)
        for number in range(10):
            answer = client.completions.create(model=MODEL, prompt=f"{number} ", max_tokens=4)
            assert answer.choices[0].finish_reason in ("length", "stop")
        stored = client.responses.create(model=MODEL, input="hello", max_output_tokens=4)
        assert client.responses.retrieve(stored.id).id == stored.id

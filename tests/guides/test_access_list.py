"""The access list of the secure page suffices for frontends and workers, and has nothing that
they do not use."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from openai import OpenAI

from penstock.client import Client, JobCancelled
from penstock.launcher.redis_server import PrivateServer
from tests.support.launched import REPOSITORY
from tests.support.operator_pages import access_list
from tests.support.redis_topologies import HAS_WAITAOF
from tests.support.running_service import RunningService, frontend_of_workers, make_tiny_checkpoint
from tests.support.service_processes import MODEL

SECRET = "word"
# What redis-py's methods are called where the name is not the command's.
METHODS = {"delete": "del", "xgroup_create": "xgroup|create"}
# Not called by name: redis-py's own, of a transaction, of a subscriber's reply, and of Sentinel.
BY_LIBRARY = {"select", "client|setinfo", "multi", "exec", "ping"}


def permitted() -> set[str]:
    return {word.removeprefix("+") for word in access_list(SECRET) if word.startswith("+")}


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with PrivateServer() as made:
        with redis.Redis.from_url(made.url) as admin:
            admin.execute_command(*access_list(SECRET))
        yield made


@pytest.fixture(scope="module")
def service(server: PrivateServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("service")
    url = server.url.replace("unix://", f"unix://penstock:{SECRET}@")
    checkpoint = make_tiny_checkpoint(directory)
    # Slow, so that there is something to cancel.
    models = {MODEL: {"MODEL": str(checkpoint), "ECHO_STEP_MS": "10"}}
    files = str(directory / "files")
    with frontend_of_workers(url, "penstock", directory, models, files_dir=files) as made:
        yield made


def test_a_service_runs_with_this_user_alone(
    server: PrivateServer, service: RunningService
) -> None:
    with Client(service.base_url) as client:
        use_jobs(client, ["fsync", "none"] if HAS_WAITAOF else ["none"])
    use_batches(service.base_url)
    with redis.Redis.from_url(server.url) as admin:
        refused = admin.execute_command("ACL", "LOG")
    assert refused == []


def use_jobs(client: Client, durabilities: list[str]) -> None:
    options = {"model": MODEL, "max_tokens": 8}
    assert client.chat("a gate and a wheel", n=2, **options).result().text
    assert client.complete("a gate", priority=3, queue_timeout=60, **options).result().text
    assert client.generate("a gate", **options).result().text
    for durability in durabilities:
        assert client.chat("a wheel", durability=durability, **options).result().text
    name = client.submit("a gate", model=MODEL, max_output_tokens=8)
    assert client.follow(name).result().text == client.follow(name, raw=True).result().text
    assert client.job(name)["status"] == "finished"
    assert client.jobs(limit=5)
    long = client.chat("a gate", model=MODEL, max_tokens=400, ignore_eos=True)
    next(long)
    client.cancel(long.job_id)
    with pytest.raises(JobCancelled):
        long.result()
    client.call("POST", f"/v1/jobs/{name}/stream-token")
    client.call("GET", "/v1/dead-letters")
    client.call("GET", "/health")
    client.call("DELETE", f"/v1/responses/{name}")


def use_batches(url: str) -> None:
    body = {"model": MODEL, "prompt": "a gate", "max_tokens": 2}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        file = client.files.create(file=("rows.jsonl", json.dumps(row).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="1h"
        )
        deadline_s = time.monotonic() + 60
        while (found := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < deadline_s, found
            time.sleep(0.1)
        assert found.output_file_id is not None
        client.files.delete(found.output_file_id)
        assert client.files.list().data
        assert client.batches.list().data


def test_the_service_is_refused_what_is_not_in_the_list(server: PrivateServer) -> None:
    """The list is what permits: without one command of it the server says no."""
    url = server.url.replace("unix://", f"unix://penstock:{SECRET}@")
    with redis.Redis.from_url(url) as ours:
        assert ours.ping()
        for words in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("GET", "other:x")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                ours.execute_command(*words)
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "LOG", "RESET")


def used_by_scripts() -> set[str]:
    found = {"publish"}
    for path in (REPOSITORY / "shared/transport/lua").rglob("*.lua"):
        for name, sub in re.findall(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?", path.read_text()):
            is_pair = name in ("XGROUP", "XINFO")
            found.add(f"{name}|{sub}".lower() if is_pair else name.lower())
    return (found - {"pubsub"}) | {"pubsub|numsub"}


def test_each_command_of_a_script_is_permitted() -> None:
    assert sorted(used_by_scripts() - permitted()) == []


def test_each_permitted_command_is_used() -> None:
    sources = [
        path.read_text()
        for room in ("shared/transport", "shared/redis")
        for path in (REPOSITORY / room).rglob("*.py")
        if path.name != "cli.py"
    ]
    methods = {name for text in sources for name in re.findall(r"\.([a-z_]+)\(", text)}
    words = {word.lower() for text in sources for word in re.findall(r'"([A-Z]{3,})"', text)}
    named = {METHODS.get(name, name) for name in methods} | words
    assert sorted(permitted() - named - used_by_scripts() - BY_LIBRARY) == []

"""Another checkpoint under a served name, while requests for the one before wait."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.worker.conftest import StartWorker
from tests.support.checkpoints import make_checkpoint
from tests.support.running_service import RunningService, running_frontend, wait_until
from tests.support.service_processes import WorkerProcess

NAME = "served"
BODY = {"model": NAME, "prompt": "a prompt of some tokens", "max_tokens": 4, "temperature": 0}
BACKGROUND = {"model": NAME, "input": "a prompt", "max_output_tokens": 4, "background": True}
OLD_VOCAB_SIZE = 512

StartOf = Callable[[Path], WorkerProcess]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("old") / "m", vocab_size=OLD_VOCAB_SIZE)


@pytest.fixture(scope="module", params=[384, OLD_VOCAB_SIZE], ids=["smaller", "equal"])
def new(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a smaller vocabulary than the old one's, or one of its size and another template."""
    path = make_checkpoint(
        tmp_path_factory.mktemp("new") / "m",
        vocab_size=request.param,
        seed=1,
        chat_template="{% for m in messages %}{{ m['content'] }};{% endfor %}",
    )
    return path


@pytest.fixture
def service(redis_url: str, namespace: str, tmp_path: Path) -> Iterator[RunningService]:
    with running_frontend(redis_url, namespace, files_dir=str(tmp_path / "files")) as frontend:
        yield frontend


@pytest.fixture
def start(start_worker: StartWorker, service: RunningService) -> StartOf:
    def begin(checkpoint: Path) -> WorkerProcess:
        return start_worker(MODEL=checkpoint, SERVED_MODEL_NAME=NAME)

    return begin


@pytest.fixture
def client(service: RunningService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        yield client


def served_and_gone(start: StartOf, service: RunningService, old: Path) -> None:
    """Returns when the frontend knows the old model and no worker serves it."""
    worker = asyncio.run(start(old).ready())
    service.until_ready()
    worker.signal(signal.SIGTERM)
    assert asyncio.run(worker.ended()) == 0


def num_queued(service: RunningService) -> int:
    return service.call(service.transport.registry.queue_stats()).queued


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins `work`; the returned function waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()

    def result() -> Any:
        thread.join(60)
        return found[0]

    return result


def test_requests_that_wait_end_with_a_retryable_code_and_are_served_when_sent_again(
    start: StartOf, service: RunningService, client: httpx.Client, old: Path, new: Path
) -> None:
    served_and_gone(start, service, old)
    whole = in_thread(lambda: client.post("/v1/completions", json=BODY))
    several = in_thread(lambda: client.post("/v1/completions", json={**BODY, "n": 3}))
    streamed = in_thread(lambda: client.post("/v1/completions", json={**BODY, "stream": True}))
    background = client.post("/v1/responses", json=BACKGROUND).json()
    wait_until(lambda: num_queued(service) == 4, "the queue")
    asyncio.run(start(new).ready())
    for answer in (whole(), several()):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_replaced")
        assert answer.headers["x-should-retry"] == "true"
    assert "model_replaced" in streamed().text
    ended = f"/v1/responses/{background['id']}"
    wait_until(lambda: client.get(ended).json()["status"] == "failed", "its end")
    wait_until(lambda: client.post("/v1/completions", json=BODY).status_code == 200, "an answer")


def test_a_row_of_a_batch_is_prepared_again(
    start: StartOf, service: RunningService, client: httpx.Client, old: Path, new: Path
) -> None:
    served_and_gone(start, service, old)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
    uploaded = client.post(
        "/v1/files",
        files={"file": ("rows.jsonl", json.dumps(line).encode() + b"\n")},
        data={"purpose": "batch"},
    ).json()
    batch = client.post(
        "/v1/batches",
        json={
            "input_file_id": uploaded["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
    ).json()
    wait_until(lambda: num_queued(service) == 1, "the row's job")
    asyncio.run(start(new).ready())
    path = f"/v1/batches/{batch['id']}"
    wait_until(lambda: client.get(path).json()["status"] == "completed", "the batch's end")
    assert client.get(path).json()["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

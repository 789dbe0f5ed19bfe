"""No worker lives: requests wait in the queue, within their deadlines. Workers are processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.batches import begin_batch, ended_batch
from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    RunningService,
    make_tiny_checkpoint,
    running_frontend,
    wait_until,
)
from tests.support.service_processes import MODEL, WorkerProcess, worker_process
from tests.support.sse_readers import payloads

LIMIT_S = 60
BODY = {"prompt": "the gate and the wheel ", "max_tokens": 20}


class Deployment:
    """A frontend, and workers that a test starts and ends."""

    def __init__(self, redis: str, directory: Path, stack: ExitStack, **settings: Any) -> None:
        self.redis, self.directory, self.stack = redis, directory, stack
        self.namespace = new_namespace()
        self.checkpoint = make_tiny_checkpoint(directory)
        self.frontend = self.start_frontend(**settings)
        self._num_workers = 0

    def start_frontend(self, **settings: Any) -> RunningService:
        files = str(self.directory / "files")
        made = running_frontend(
            self.redis, self.namespace, keepalive_s=0.1, files_dir=files, **settings
        )
        return self.stack.enter_context(made)

    def start_worker(self) -> WorkerProcess:
        self._num_workers += 1
        log = self.directory / f"worker{self._num_workers}.log"
        settings = {
            "LEASE_MS": "2000",
            "BEAT_INTERVAL_MS": "300",
            "DRAIN_TIMEOUT_S": "1",
            "ECHO_STEP_MS": "5",
        }
        made = worker_process(self.redis, self.namespace, self.checkpoint, log, **settings)
        worker = self.stack.enter_context(made)

        def is_served() -> bool:
            assert worker.alive, worker.log
            return bool(self.health()["status"] == "ok")

        wait_until(is_served, "a worker", LIMIT_S)
        return worker

    def end_worker(self, worker: WorkerProcess, how: signal.Signals) -> None:
        worker.signal(how)
        worker.popen.wait(30)

        def is_known_to_be_gone() -> bool:
            # Workers and models are looked at in turn: both pictures must know, and a worker that
            # was there for a moment only may not be in the second one yet.
            models = self.get("/v1/models").json()["data"]
            is_gone = bool(models) and not any(model["is_served"] for model in models)
            return is_gone and bool(self.health()["status"] == "no_workers")

        wait_until(is_known_to_be_gone, "its lease's end", LIMIT_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.frontend.base_url + path, timeout=20)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.frontend.base_url + path, json=body, timeout=60)

    def health(self) -> dict[str, Any]:
        return dict(self.get("/health").json())

    def waiting(self) -> int:
        return int(self.health()["models"].get(MODEL, {}).get("waiting", 0))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.promise(
    "Access: without a worker requests wait, for models that were served recently or are kept, "
    "within their deadlines (ten minutes; always while a frontend with `PENSTOCK_KEEP_MODELS` runs "
    "at least once a day)"
)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_chat_waits_for_the_next_worker_and_is_answered(
    redis_url: str, tmp_path: Path, stack: ExitStack, how: signal.Signals
) -> None:
    served = Deployment(redis_url, tmp_path, stack)
    assert served.get("/ready").status_code == 503, "no model was ever announced"
    refused = served.post("/generate", {**BODY, "model": MODEL})
    assert refused.status_code == 503
    assert "No worker has announced a model yet" in refused.json()["error"]["message"]
    served.end_worker(served.start_worker(), how)

    ready = served.get("/ready")
    assert ready.status_code == 200
    assert (ready.json()["models"], ready.json()["unserved"]) == ([MODEL], [MODEL])
    (model,) = served.get("/v1/models").json()["data"]
    assert (model["id"], model["is_served"]) == (MODEL, False)

    body = {**BODY, "model": MODEL, "stream": True}
    url = f"{served.frontend.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=LIMIT_S) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        assert next(line for line in lines if line).startswith(":"), "a keep-alive comment"
        wait_until(lambda: served.waiting() == 1, "one that waits", LIMIT_S)
        metrics = served.get("/metrics/deployment").text
        assert f'penstock:queue_depth{{model_name="{MODEL}"}} 1.0' in metrics
        served.start_worker()
        chunks = payloads(lines)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert text.startswith("the gate")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: served.waiting() == 0, "none that waits", LIMIT_S)


def test_a_job_that_waits_in_vain_ends_in_time_without_any_worker(
    redis_url: str, tmp_path: Path, stack: ExitStack
) -> None:
    served = Deployment(redis_url, tmp_path, stack)
    served.end_worker(served.start_worker(), signal.SIGKILL)
    ended = served.post("/generate", {**BODY, "queue_timeout": 1.0, "stream": False})
    assert (ended.status_code, ended.json()["error"]["code"]) == (504, "queue_timeout")
    background = {"model": MODEL, "input": "a gate", "background": True}
    made = served.post("/v1/responses", background)
    assert (made.status_code, made.json()["status"]) == (200, "queued")
    wait_until(lambda: served.waiting() == 1, "one that waits", LIMIT_S)


def test_after_the_set_time_a_model_without_a_worker_is_refused_again_but_for_one_that_is_kept(
    redis_url: str, tmp_path: Path, stack: ExitStack
) -> None:
    # A late look may cost seconds.
    served = Deployment(redis_url, tmp_path, stack, model_retention_s=15)
    keeping = served.start_frontend(model_retention_s=0, keep_models=f"other,{MODEL}")
    served.end_worker(served.start_worker(), signal.SIGKILL)
    assert served.get("/ready").status_code == 200
    wait_until(lambda: served.get("/ready").status_code == 503, "the end of its time", LIMIT_S)
    refused = served.post("/v1/completions", {**BODY, "model": MODEL})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
    assert "No worker has served this model" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert served.get("/v1/models").json()["data"] == []

    assert httpx.get(f"{keeping.base_url}/ready").status_code == 200
    never = httpx.post(f"{keeping.base_url}/v1/completions", json={**BODY, "model": "other"})
    assert never.status_code == 503, "it has no tokenizer"
    assert "No worker has announced this model yet" in never.json()["error"]["message"]
    body = {"model": MODEL, "input": "a gate", "background": True}
    made = httpx.post(f"{keeping.base_url}/v1/responses", json=body, timeout=20)
    assert (made.status_code, made.json()["status"]) == (200, "queued")
    # Also shown by the frontend that accepts no more.
    wait_until(lambda: served.waiting() == 1, "one that waits", LIMIT_S)


def test_rows_of_a_batch_wait_for_the_next_worker(
    redis_url: str, tmp_path: Path, stack: ExitStack
) -> None:
    served = Deployment(redis_url, tmp_path, stack)
    served.end_worker(served.start_worker(), signal.SIGTERM)
    with httpx.Client(base_url=served.frontend.base_url, timeout=60) as client:
        batch_id = begin_batch(client, *[{**BODY, "model": MODEL}] * 5).json()["id"]
        wait_until(lambda: served.waiting() == 5, "rows in the queue", LIMIT_S)
        served.start_worker()
        ended = ended_batch(client, batch_id, LIMIT_S)
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 5, "completed": 5, "failed": 0}

"""A frontend with a scripted worker, and the jobs that tests of a job's pages make there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import RunningService, make_tiny_checkpoint, running_service
from tests.support.scripted_worker import Script

PROMPT = {"prompt": "a gate and a wheel ", "ignore_eos": True, "queue_timeout": 300}
KEPT = {**PROMPT, "on_disconnect": "continue"}


@pytest.fixture(scope="module")
def service(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningService]:
    directory: Path = tmp_path_factory.mktemp("job-page")
    checkpoint = make_tiny_checkpoint(directory)
    with running_service(redis_url, new_namespace(), checkpoint) as made:
        yield made


@pytest.fixture(autouse=True)
def _untouched_script(service: RunningService) -> Iterator[None]:
    service.worker.script = Script()
    yield
    service.worker.script = Script()


def generated(service: RunningService, **more: Any) -> dict[str, Any]:
    body = {**PROMPT, "max_tokens": 20, "stream": False, **more}
    answer = httpx.post(f"{service.base_url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def begun(service: RunningService, **more: Any) -> str:
    """The id of a job that nobody reads any more."""
    body = {**KEPT, "max_tokens": 400, **more}
    with httpx.stream("POST", f"{service.base_url}/generate", json=body, timeout=60) as answer:
        return str(answer.headers["x-request-id"])


def job_of(service: RunningService, name: str) -> dict[str, Any]:
    job: dict[str, Any] = httpx.get(f"{service.base_url}/v1/jobs/{name}").json()
    return job

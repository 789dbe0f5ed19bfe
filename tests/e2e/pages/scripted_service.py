"""A frontend with a scripted worker, and the jobs that tests of a job's pages make there."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.running_service import RunningService
from tests.support.service_fixtures import *  # noqa: F403
from tests.support.service_fixtures import module_service

PROMPT = {"prompt": "a gate and a wheel ", "ignore_eos": True, "queue_timeout": 300}
KEPT = {**PROMPT, "on_disconnect": "continue"}

shared_service = module_service()


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

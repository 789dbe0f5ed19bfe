"""Frontend and worker as the processes they are in production; the worker's engine echoes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import make_tiny_checkpoint, wait_until
from tests.support.service_processes import MODEL, service_processes


@pytest.fixture(scope="module")
def base_url(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    directory, namespace = tmp_path_factory.mktemp("real"), new_namespace()
    files = make_tiny_checkpoint(directory)
    with service_processes(
        redis_url, namespace, files, directory, ECHO_STEP_MS="25", DRAIN_TIMEOUT_S="1"
    ) as frontend:
        yield frontend.base_url


def test_the_sdk_streams_what_the_worker_makes(base_url: str) -> None:
    with OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        prompt = "the gate and the wheel 😀 "
        whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40)
        chunks = list(
            client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert text.startswith(prompt)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40


def test_stop_strings_are_held_back_and_never_shown(base_url: str) -> None:
    body = {"prompt": "one two three four five six", "max_tokens": 60, "stop": ["three"]}
    lines = [
        json.loads(line.removeprefix("data: "))
        for line in httpx.post(f"{base_url}/generate", json=body).text.splitlines()
        if line.startswith("data: {")
    ]
    assert lines[-1]["full_text"] == "one two " == "".join(line["text"] for line in lines)
    assert (lines[-1]["finish_reason"], lines[-1]["stop_reason"]) == ("stop", "three")


def test_leaving_empties_the_engine(base_url: str) -> None:
    def running() -> int:
        return int(httpx.get(f"{base_url}/health").json()["running"])

    body = {"prompt": "a b c", "max_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", f"{base_url}/generate", json=body) as stream:
        name = stream.headers["x-request-id"]
        wait_until(lambda: running() == 1, "one running")
    wait_until(lambda: running() == 0, "none running")
    job = httpx.get(f"{base_url}/v1/jobs/{name}").json()
    assert (job["status"], job["error"]["code"]) == ("cancelled", "disconnected")


def test_health_has_the_engines_steps(base_url: str) -> None:
    before = httpx.get(f"{base_url}/health").json()["workers"][0]["step"]
    httpx.post(f"{base_url}/generate", json={"prompt": "abc", "stream": False})
    wait_until(
        lambda: httpx.get(f"{base_url}/health").json()["workers"][0]["step"] > before, "a step"
    )

"""Responses over two frontends, and worker processes that die."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.checkpoints import make_checkpoint
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import running_frontend, wait_until
from tests.support.service_processes import MODEL, process, worker_process
from tests.support.throttle import FAULTS, Throttle

LIMIT_S = 60.0


@dataclass
class Deployment:
    """Two frontends; workers come and go."""

    urls: tuple[str, str]
    redis_url: str
    namespace: str
    directory: Path
    checkpoint: Path

    def worker(self, name: str, **settings: str) -> Any:
        """A context manager: a worker with the echo runner."""
        log = self.directory / f"{name}.log"
        more = {"LEASE_MS": "3000", "BEAT_INTERVAL_MS": "200", "DRAIN_TIMEOUT_S": "1"}
        return worker_process(
            self.redis_url, self.namespace, self.checkpoint, log, **{**more, **settings}
        )

    def workers(self) -> int:
        return len(httpx.get(f"{self.urls[0]}/health", timeout=10).json()["workers"])

    def until_ready(self, num_workers: int) -> None:
        wait_until(lambda: self.workers() == num_workers, f"{num_workers} workers", LIMIT_S)
        for url in self.urls:
            wait_until(partial(_is_ready, url), "readiness", LIMIT_S)


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=10).status_code == 200


@pytest.fixture(scope="module")
def deployment(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    directory, namespace = tmp_path_factory.mktemp("responses"), new_namespace()
    checkpoint = make_checkpoint(directory / "tiny")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(running_frontend(redis_url, namespace)) for _ in range(2)
        )
        urls = (first.base_url, second.base_url)
        yield Deployment(urls, redis_url, namespace, directory, checkpoint)


@pytest.fixture
def clients(deployment: Deployment) -> Iterator[list[OpenAI]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
            for url in deployment.urls
        ]


@pytest.mark.promise(
    "Responses: the same events with the same numbers, from any frontend, at any time, after any "
    "failure"
)
def test_live_resumed_and_late_readers_see_the_same_events_though_the_worker_dies(
    deployment: Deployment, clients: list[OpenAI], tmp_path: Path
) -> None:
    params: Any = {
        "model": MODEL,
        "input": "the gate and the wheel 😀 é",
        "max_output_tokens": 120,
        "stream": True,
        "include": ["message.output_text.logprobs"],
        "extra_body": {"ignore_eos": True},
    }
    throttle = Throttle(tmp_path / "throttle")
    faults = {**throttle.env, "PYTHONPATH": str(FAULTS)}
    with deployment.worker("first", **faults) as first:
        deployment.until_ready(1)
        undisturbed = list(clients[0].responses.create(**params))
        throttle.apply(after_tokens=15, step_s=5.0)
        live = clients[0].responses.create(**params)
        received = [next(live).to_dict() for _ in range(12)]
        response_id = received[0]["response"]["id"]
        with deployment.worker("second"):
            resumed = clients[1].responses.retrieve(response_id, stream=True, starting_after=7)
            resumed_told = [next(resumed).to_dict()]
            deployment.until_ready(2)
            assert clients[1].responses.retrieve(response_id).status == "in_progress"
            first.kill()
            throttle.release()
            received += [event.to_dict() for event in live]
            resumed_told += [event.to_dict() for event in resumed]
            job = httpx.get(f"{deployment.urls[1]}/v1/jobs/{response_id}").json()
            assert job["attempt"] >= 2
        late = clients[1].responses.retrieve(response_id, stream=True)
        late_told = [event.to_dict() for event in late]
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    assert received == late_told
    assert received[8:] == resumed_told
    assert received[-1]["type"] == "response.incomplete"
    assert len(received) == len(undisturbed)
    whole = undisturbed[-1].response
    assert received[-1]["response"]["output"][0]["content"] == [
        part.to_dict() for part in whole.output[0].content
    ]
    # Nobody serves the model any more, and the response is still there.
    wait_until(lambda: deployment.workers() == 0, "no worker", LIMIT_S)
    kept = clients[1].responses.retrieve(response_id)
    assert kept.to_dict() == received[-1]["response"]


def test_a_response_in_the_background_goes_on_when_its_frontend_is_killed(
    deployment: Deployment, clients: list[OpenAI], tmp_path: Path
) -> None:
    throttle = Throttle(tmp_path / "throttle")
    with (
        deployment.worker("lonely", **throttle.env, PYTHONPATH=str(FAULTS)),
        process(deployment.redis_url, deployment.namespace) as doomed,
    ):
        deployment.until_ready(1)
        wait_until(partial(_is_ready, doomed.base_url), "readiness", LIMIT_S)
        throttle.apply(after_tokens=8, step_s=5.0)
        received: list[dict[str, Any]] = []

        def read_until_it_dies() -> None:
            with OpenAI(base_url=f"{doomed.base_url}/v1", api_key="none", max_retries=0) as client:
                stream = client.responses.create(
                    model=MODEL, input="abc", background=True, stream=True, max_output_tokens=30
                )
                for event in stream:
                    received.append(event.to_dict())
                    if len(received) == 8:
                        doomed.popen.kill()

        with pytest.raises(openai.APIConnectionError):
            read_until_it_dies()
        throttle.release()
        response_id, number = received[0]["response"]["id"], received[-1]["sequence_number"]
        rest = clients[0].responses.retrieve(response_id, stream=True, starting_after=number)
        received += [event.to_dict() for event in rest]
        late = clients[1].responses.retrieve(response_id, stream=True)
        assert received == [event.to_dict() for event in late]
        assert received[-1]["response"]["usage"]["output_tokens"] == 30

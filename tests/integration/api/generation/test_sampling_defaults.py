"""The sampling that the makers of a model recommend holds for what a request leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.checkpoints import make_checkpoint
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import (
    MODEL,
    RunningService,
    running_frontend,
    running_service,
    wait_until,
)
from tests.support.service_processes import worker_process

MAKERS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
USER = {"role": "user", "content": "hi"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/generate": {"prompt": "hi", "max_tokens": 2, "stream": False},
}
# Members that a dialect has under another name, or does not have.
RENAMED = {"/generate": {"repetition_penalty": "rep_penalty"}}
LACKING = {"/v1/messages": {"min_p", "repetition_penalty"}}


def make_recommending(path: Path) -> Path:
    make_checkpoint(path)
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **MAKERS, "do_sample": False}))
    return path


@pytest.fixture(scope="module")
def service(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningService]:
    directory = tmp_path_factory.mktemp("defaults")
    checkpoint = make_recommending(directory / "tiny")
    files = str(directory / "files")
    with running_service(redis_url, new_namespace(), checkpoint, files_dir=files) as made:
        yield made


def sampling_of(service: RunningService, name: str) -> dict[str, float]:
    """What the job shows, without what no model recommends."""
    shown = dict(httpx.get(f"{service.base_url}/v1/jobs/{name}").json()["sampling"])
    assert {shown.pop("max_tokens"), shown.pop("seed")}
    return shown


def send(
    service: RunningService, route: str, **members: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """The answer, and the sampling that its job has."""
    body = {"model": MODEL, **ROUTES[route], **members}
    answer = httpx.post(f"{service.base_url}{route}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json(), sampling_of(service, answer.headers["x-request-id"])


@pytest.mark.promise(
    "Clients: sampling parameters have the model's recommended defaults, in every dialect, "
    "switchable and shown"
)
@pytest.mark.parametrize("route", ROUTES)
def test_omitted_parameters_are_the_models(service: RunningService, route: str) -> None:
    assert send(service, route)[1] == MAKERS
    nulls = {
        RENAMED.get(route, {}).get(name, name): None
        for name in MAKERS
        if name not in LACKING.get(route, ())
    }
    assert send(service, route, **nulls)[1] == MAKERS


@pytest.mark.parametrize("route", ROUTES)
def test_each_parameter_reaches_the_sampling_params(service: RunningService, route: str) -> None:
    params = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    for name, value in params.items():
        if name not in LACKING.get(route, ()):
            member = RENAMED.get(route, {}).get(name, name)
            assert send(service, route, **{member: value})[1] == {**MAKERS, name: value}


def test_a_response_has_its_sampling_parameters(service: RunningService) -> None:
    answer, _ = send(service, "/v1/responses")
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    again = httpx.get(f"{service.base_url}/v1/responses/{answer['id']}").json()
    assert (again["temperature"], again["top_p"]) == (0.6, 0.95)
    answer, _ = send(service, "/v1/responses", temperature=0.1)
    assert (answer["temperature"], answer["top_p"]) == (0.1, 0.95)


def test_a_row_of_a_batch_has_them_too(service: RunningService) -> None:
    body = {"model": MODEL, **ROUTES["/v1/chat/completions"]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with OpenAI(base_url=f"{service.base_url}/v1", api_key="none") as client:
        file = client.files.create(file=("rows.jsonl", json.dumps(row).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        line = json.loads(client.files.content(output).text)
    assert sampling_of(service, line["response"]["request_id"]) == MAKERS


def test_the_same_request_under_one_key_is_the_same_job(service: RunningService) -> None:
    """The key's digest is of the body as it came, not of what was filled in."""
    body = {"model": MODEL, **ROUTES["/v1/completions"]}
    headers = {"Idempotency-Key": "defaults-1"}
    url = f"{service.base_url}/v1/completions"
    first, second = (httpx.post(url, json=body, headers=headers).json() for _ in range(2))
    assert first["id"] == second["id"]
    explicit = httpx.post(url, json={**body, "temperature": 0.6}, headers=headers)
    assert explicit.json()["error"]["code"] == "idempotency_key_reuse"


def test_the_model_object_has_its_defaults(service: RunningService) -> None:
    (model,) = httpx.get(f"{service.base_url}/v1/models").json()["data"]
    assert model["default_sampling"] == MAKERS


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, MAKERS),
        ({"GENERATION_CONFIG": "none"}, {}),
        ({"OVERRIDE_GENERATION_CONFIG": '{"temperature": 0.2}'}, {**MAKERS, "temperature": 0.2}),
        (
            {"GENERATION_CONFIG": "none", "OVERRIDE_GENERATION_CONFIG": '{"top_k": 5}'},
            {"top_k": 5},
        ),
    ],
    ids=["auto", "none", "override", "none-override"],
)
def test_a_worker_s_settings_choose_them(
    redis_url: str,  # noqa: F811
    tmp_path: Path,
    settings: dict[str, str],
    shown: dict[str, float],
) -> None:
    checkpoint, namespace = make_recommending(tmp_path / "tiny"), new_namespace()
    with (
        worker_process(redis_url, namespace, checkpoint, tmp_path / "log", **settings) as worker,
        running_frontend(redis_url, namespace) as service,
    ):

        def listed() -> list[dict[str, Any]]:
            assert worker.alive, worker.log
            return list(httpx.get(f"{service.base_url}/v1/models").json()["data"])

        wait_until(listed, "a model", 120)
        (model,) = listed()
    assert model["default_sampling"] == shown

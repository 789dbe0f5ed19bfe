"""The sampling that the makers of a model recommend holds for what a request leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.batches import batch_of
from tests.support.checkpoints import make_checkpoint
from tests.support.dialects import DIALECTS, Dialect
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, frontend_of_workers
from tests.support.service_fixtures import module_service

MAKERS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)


def make_recommending(path: Path) -> Path:
    make_checkpoint(path)
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **MAKERS, "do_sample": False}))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recommending(tmp_path_factory.mktemp("defaults") / "tiny")


shared_service = module_service()


def sampling_of(service: RunningService, name: str) -> dict[str, float]:
    """What the job shows, without what no model recommends."""
    shown = dict(service.job(name)["sampling"])
    assert {shown.pop("max_tokens"), shown.pop("seed")}
    return shown


def send(
    service: RunningService, dialect: Dialect, **members: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """The answer, and the sampling that its job has."""
    with httpx.Client(base_url=service.base_url, timeout=30) as client:
        answer = dialect.post(client, **members)
    assert answer.status_code == 200, answer.text
    return answer.json(), sampling_of(service, answer.headers["x-request-id"])


@pytest.mark.promise(
    "Clients: sampling parameters have the model's recommended defaults, in every dialect, "
    "switchable and shown"
)
@every_dialect
def test_omitted_parameters_are_the_models(service: RunningService, dialect: Dialect) -> None:
    assert send(service, dialect)[1] == MAKERS
    assert send(service, dialect, **dict.fromkeys(MAKERS))[1] == MAKERS


@every_dialect
def test_each_parameter_reaches_the_sampling_params(
    service: RunningService, dialect: Dialect
) -> None:
    params = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    for name in params.keys() - dialect.lacking:
        given = {name: params[name]}
        assert send(service, dialect, **given)[1] == {**MAKERS, **given}


def test_a_response_has_its_sampling_parameters(service: RunningService) -> None:
    answer, _ = send(service, DIALECTS["responses"])
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    again = httpx.get(f"{service.base_url}/v1/responses/{answer['id']}").json()
    assert (again["temperature"], again["top_p"]) == (0.6, 0.95)
    answer, _ = send(service, DIALECTS["responses"], temperature=0.1)
    assert (answer["temperature"], answer["top_p"]) == (0.1, 0.95)


def test_a_row_of_a_batch_has_them_too(service: RunningService) -> None:
    body = DIALECTS["chat"].body()
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        line = batch_of(client, body, "output_file_id")
    assert sampling_of(service, line["response"]["request_id"]) == MAKERS


def test_the_same_request_under_one_key_is_the_same_job(service: RunningService) -> None:
    """The key's digest is of the body as it came, not of what was filled in."""
    body = DIALECTS["completions"].body()
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
    redis_url: str,
    tmp_path: Path,
    settings: dict[str, str],
    shown: dict[str, float],
) -> None:
    models = {MODEL: {"MODEL": str(make_recommending(tmp_path / "tiny")), **settings}}
    with frontend_of_workers(redis_url, new_namespace(), tmp_path, models) as service:
        (model,) = httpx.get(f"{service.base_url}/v1/models").json()["data"]
    assert model["default_sampling"] == shown

"""One `make run` with both engines: they share the queue of one model, beside another model."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import Launched
from tests.support.service_client import ServiceClient
from tests.support.vllm_environment import VARIABLE
from tests.support.vllm_worker import ALIKE, READY_TIMEOUT_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

FILE = """
[[models]]
served_model_name = "both"

[[models]]
served_model_name = "both"
engine = "vllm"
vllm_args = {enforce_eager = true}

[[models]]
served_model_name = "echo"
runner = "echo"
"""
REQUEST = {
    "model": "both",
    "prompt": [(7 * i) % 500 + 5 for i in range(20)],
    "temperature": 1.0,
    "seed": 11,
    "max_tokens": 24,
    "stream": False,
}


@pytest.mark.promise(
    "Models: both engines may serve one model; a seeded request has one text (in float32)"
)
def test_both_engines_serve_one_model_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(FILE)
    env = {**ALIKE, "MODELS_FILE": "models.toml", "READY_TIMEOUT_S": str(READY_TIMEOUT_S)}
    if named := os.environ.get(VARIABLE):
        env["ENGINE_PYTHON"] = named  # else the launcher finds what `make vllm` made
    with Launched(tmp_path, env) as penstock, ServiceClient(penstock) as service:
        assert "Models: both, echo\n" in penstock.output
        service.until(lambda: len(_engines(service)) == 3, "all workers", READY_TIMEOUT_S)
        engines = _engines(service)
        assert sorted(engines.values()) == ["penstock", "penstock", "vllm"]
        models = {model["id"]: model for model in service.http.get("/v1/models").json()["data"]}
        assert models["echo"]["engine"] == "penstock"
        service.until(lambda: _engine_of_both(service) == "mixed", "both engines in /v1/models")
        texts, took_part = set[str](), set[str]()
        with ThreadPoolExecutor(8) as pool:
            for _ in range(20):  # a quick engine may take a whole round
                for answer in pool.map(lambda _: _answer(service), range(8)):
                    texts.add(answer["text"])
                    job = service.http.get(f"/v1/jobs/{answer['id']}").json()
                    took_part.add(engines[job["worker"]])
                if len(took_part) == 2:
                    break
        assert took_part == {"penstock", "vllm"}
        assert len(texts) == 1  # whichever computed it


def _engines(service: ServiceClient) -> dict[str, str]:
    return {worker["id"]: worker["engine"] for worker in service.health()["workers"]}


def _engine_of_both(service: ServiceClient) -> str:
    return str(service.http.get("/v1/models/both").json()["engine"])


def _answer(service: ServiceClient) -> dict[str, Any]:
    response = service.http.post("/generate", json=REQUEST)
    assert response.status_code == 200, response.text
    return dict(response.json())

"""POST /v1/embeddings through a frontend and real workers."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from openai import OpenAI
from torch.nn.functional import normalize

from penstock.client import Client
from tests.support.batches import begin_batch, ended_batch
from tests.support.checkpoints import make_checkpoint
from tests.support.embedding_models import (
    SIZE,
    hidden_states,
    make_embedding_checkpoint,
    pooled,
)
from tests.support.polling import wait_until
from tests.support.redis_server import new_namespace, redis_url
from tests.support.running_service import RunningService, running_frontend
from tests.support.service_processes import WorkerProcess

__all__ = ["redis_url"]

MODEL, TALKER = "vectors", "talker"
TEXTS = [f"The keeper counts to {number}." for number in range(30)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_checkpoint(tmp_path_factory.mktemp("embedding") / "m")


class Service:
    """A frontend, and workers that a test may kill."""

    def __init__(self, frontend: RunningService, worker_settings: dict[str, object], path: Path):
        self.frontend, self._settings, self._path = frontend, worker_settings, path
        self.workers: list[WorkerProcess] = []

    def start_worker(self, **settings: object) -> WorkerProcess:
        path = self._path / f"worker{len(self.workers)}.log"
        self.workers.append(WorkerProcess({**self._settings, **settings}, path))
        return self.workers[-1]


@pytest.fixture(scope="module")
def service(
    redis_url: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    namespace, path = new_namespace(), tmp_path_factory.mktemp("service")
    settings: dict[str, object] = {
        "REDIS_URL": redis_url,
        "NAMESPACE": namespace,
        "MODEL": checkpoint,
        "SERVED_MODEL_NAME": MODEL,
        "DEVICE": "cpu",
        "LEASE_MS": "2000",
        "BEAT_INTERVAL_MS": "200",
        "MAX_NUM_BATCHED_TOKENS": "64",
    }
    with running_frontend(redis_url, namespace, files_dir=str(path / "files")) as frontend:
        made = Service(frontend, settings, path)
        talker = make_checkpoint(path / "talker")
        try:
            made.start_worker()
            made.start_worker(MODEL=talker, SERVED_MODEL_NAME=TALKER, RUNNER="echo")
            with httpx.Client(base_url=frontend.base_url, timeout=60) as client:
                wait_until(
                    lambda: len(client.get("/v1/models").json()["data"]) == 2, "both models", 120
                )
            yield made
        finally:
            for worker in made.workers:
                worker.close()


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.frontend.base_url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def expected(service: Service, checkpoint: Path) -> torch.Tensor:
    """The vectors of TEXTS by transformers."""
    with httpx.Client(base_url=service.frontend.base_url, timeout=60) as client:
        ids = [
            client.post("/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"]
            for text in TEXTS
        ]
    states = hidden_states(checkpoint, ids)
    return torch.stack([normalize(pooled(one, "mean"), dim=0) for one in states])


def vectors_of(body: dict[str, object]) -> torch.Tensor:
    data = body["data"]
    assert isinstance(data, list)
    assert [one["index"] for one in data] == list(range(len(data)))
    return torch.tensor([one["embedding"] for one in data])


def test_openais_sdk_gets_the_vectors_of_the_model(
    service: Service, expected: torch.Tensor
) -> None:
    with OpenAI(base_url=f"{service.frontend.base_url}/v1", api_key="none", max_retries=0) as sdk:
        whole = sdk.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64
        plain = sdk.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
        fewer = sdk.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8)
    found = torch.tensor([one.embedding for one in whole.data])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (whole.model, whole.usage.prompt_tokens) == (MODEL, whole.usage.total_tokens)
    torch.testing.assert_close(
        torch.tensor(plain.data[0].embedding), expected[0], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        torch.tensor(fewer.data[0].embedding),
        normalize(expected[0][:8], dim=0),
        atol=1e-5,
        rtol=0,
    )


def test_token_ids_are_embedded_as_their_text_is(
    client: httpx.Client, expected: torch.Tensor
) -> None:
    ids = [
        client.post("/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"]
        for text in TEXTS[:3]
    ]
    several = client.post("/v1/embeddings", json={"model": MODEL, "input": ids}).json()
    torch.testing.assert_close(vectors_of(several), expected[:3], atol=1e-5, rtol=0)
    one = client.post("/v1/embeddings", json={"model": MODEL, "input": ids[0]}).json()
    torch.testing.assert_close(vectors_of(one), expected[:1], atol=1e-5, rtol=0)
    assert one["usage"]["prompt_tokens"] == len(ids[0])


def test_base64_is_float32_in_little_endian(client: httpx.Client) -> None:
    body = {"model": MODEL, "input": TEXTS[:2]}
    plain = vectors_of(client.post("/v1/embeddings", json=body).json())
    encoded = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    decoded = [array("f", base64.b64decode(one["embedding"])).tolist() for one in encoded["data"]]
    assert torch.equal(torch.tensor(decoded), plain)


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"input": []}, "input", None),
        ({"input": ["ok", [1, 2]]}, "input", None),
        ({"input": ["word " * 100]}, "input.0", "context_length_exceeded"),
        ({"input": [[1], [1] * 67]}, "input.1", "context_length_exceeded"),
        ({"input": [[1], [99999]]}, "input", None),
        ({"input": ["x"] * 2049}, "input", None),
        ({"dimensions": 0}, "dimensions", None),
        ({"dimensions": SIZE + 1}, "dimensions", None),
        ({"encoding_format": "int8"}, "encoding_format", None),
        ({"model": TALKER}, "model", "embeddings_not_supported"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    client: httpx.Client, changes: dict[str, object], param: str, code: str | None
) -> None:
    answer = client.post("/v1/embeddings", json={"model": MODEL, "input": "a text", **changes})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/generate", {"prompt": "Hi"}),
    ],
)
def test_a_model_for_embeddings_generates_no_text(
    client: httpx.Client, path: str, body: dict[str, object]
) -> None:
    answer = client.post(path, json={"model": MODEL, **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_generative")


def test_the_rows_of_a_batch_are_embedded(client: httpx.Client, expected: torch.Tensor) -> None:
    bodies = [{"model": MODEL, "input": text} for text in TEXTS]
    batch = ended_batch(client, begin_batch(client, *bodies, url="/v1/embeddings").json()["id"])
    lines = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    rows = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, lines)}
    assert len(rows) == len(TEXTS)
    found = torch.cat([vectors_of(rows[str(number)]) for number in range(1, 31)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_request_survives_the_death_of_its_worker(service: Service, client: httpx.Client) -> None:
    texts = [f"{number} keepers count to sixty and open the gate." for number in range(2000)]
    body = {"model": MODEL, "input": texts}
    whole = vectors_of(client.post("/v1/embeddings", json=body).json())
    first = service.workers[0]
    spare = service.start_worker()
    frontend = service.frontend
    before = frontend.job_ids()
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(client.post("/v1/embeddings", json=body, timeout=120))
    )
    wait_until(lambda: "the worker is ready" in spare.log, "a second worker", 120)
    thread.start()
    job_id = ""

    def is_running() -> bool:
        nonlocal job_id
        for job_id in frontend.job_ids() - before:
            return bool(frontend.job(job_id)["status"] == "running")
        return False

    wait_until(is_running, "the job to run")
    owner = frontend.job(job_id)["worker"]
    victim = first if owner == first.worker_id else spare
    victim.signal(signal.SIGKILL)
    thread.join(120)
    assert answers[0].status_code == 200, answers[0].text
    assert frontend.job(job_id)["attempt"] == 2
    torch.testing.assert_close(vectors_of(answers[0].json()), whole, atol=1e-5, rtol=0)


def test_penstocks_client_embeds_more_texts_than_a_request_takes(
    service: Service, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.core.MAX_INPUTS", 7)
    with Client(service.frontend.base_url) as client:
        found = client.embed(TEXTS)
        fewer = client.embed(TEXTS[:1], model=MODEL, dimensions=8)
        assert client.model() == TALKER
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)
    assert len(fewer[0]) == 8


def test_generate_embed_writes_the_vector_of_each_line(
    service: Service, expected: torch.Tensor, tmp_path: Path
) -> None:
    lines = [*TEXTS[:2], json.dumps({"input": TEXTS[2:4]})]
    (tmp_path / "texts").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "generate", "--embed", str(tmp_path / "texts")],
        env={**os.environ, "PENSTOCK_URL": service.frontend.base_url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second, both = map(json.loads, done.stdout.splitlines())
    found = torch.tensor([first["embedding"], second["embedding"], *both["embeddings"]])
    torch.testing.assert_close(found, expected[:4], atol=1e-5, rtol=0)


def test_langchains_embeddings_are_those_of_the_model(
    service: Service, expected: torch.Tensor
) -> None:
    from langchain_openai import OpenAIEmbeddings

    langchain = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{service.frontend.base_url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,  # else it sends ids of OpenAI's vocabulary
    )
    found = torch.tensor(langchain.embed_documents(TEXTS))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

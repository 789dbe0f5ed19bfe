"""What holds with a model that computes: the demo model, and one that is broken in one place."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.checkpoints import make_checkpoint
from tests.support.launched import REPOSITORY, Launched
from tests.support.service_client import ServiceClient, launched_service

DEMO = "penstock-demo"
DEMO_CONFIG = REPOSITORY / "worker/demo/checkpoint/config.json"
BROKEN_TOKEN = 300


service = launched_service(
    {"BEAT_INTERVAL_MS": "100", "HEALTH_INTERVAL_S": "0.05", "DTYPE": "float32"}
)


def complete(service: ServiceClient, prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    body = {
        "model": DEMO,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = service.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]


@pytest.mark.promise(
    "Streaming: a small model without any download (trained in advance and shipped; `make "
    "demo-model` reproduces it)"
)
def test_the_model_that_ships_is_ready_without_any_download(service: ServiceClient) -> None:
    assert "the model is loaded" in service.penstock.output
    (model,) = service.http.get("/v1/models").json()["data"]
    assert f"parameters={model['num_parameters']}" in service.penstock.output
    assert model["num_parameters"] > 0
    assert model["max_model_len"] == json.loads(DEMO_CONFIG.read_text())["max_position_embeddings"]


@pytest.mark.promise(
    "Streaming: one model for the life of the process, no gradients, greedy output never varies "
    "(up to rounding where products of many rows are computed differently (ADR 9), never for "
    "small weights)"
)
def test_the_same_greedy_prompt_gives_the_same_text_alone_and_in_company(
    service: ServiceClient,
) -> None:
    prompt = "A penstock is the pipe that"
    alone = [complete(service, prompt, 24)[0] for _ in range(5)]
    with ThreadPoolExecutor(15) as pool:
        together = list(pool.map(lambda _: complete(service, prompt, 24)[0], range(15)))
    assert len({*alone, *together}) == 1


def test_a_long_prompt_comes_out_of_the_cache_the_second_time(service: ServiceClient) -> None:
    prompt = "The keeper of the gate writes the level into his book. " * 40
    usages, texts, steps = [], [], []
    for _ in range(2):
        before = service.worker().get("step", 0)
        text, usage = complete(service, prompt, 8)
        steps.append(service.until_idle()["step"] - before)
        texts.append(text)
        usages.append(usage)
    assert texts[0] == texts[1]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert cached[1] > 0.9 * usages[1]["prompt_tokens"]
    assert steps[1] <= steps[0]


def break_one_token(checkpoint: Path) -> None:
    """Whatever holds BROKEN_TOKEN gives logits that are no numbers."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    embedding = np.array(tensors["model.embed_tokens.weight"])
    embedding[BROKEN_TOKEN] = np.nan
    save_file({**tensors, "model.embed_tokens.weight": embedding}, path, {"format": "pt"})


@pytest.mark.promise("Streaming: a failing step ends its own streams with an error, and no others")
def test_a_step_that_fails_ends_its_stream_in_words_and_spares_the_others(
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(tmp_path / "broken")
    break_one_token(checkpoint)
    env = {"MODEL": str(checkpoint), "NUM_KV_BLOCKS": "40", "BLOCK_SIZE": "4"}
    good = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 60}
    bad = {"prompt": [5, 6, BROKEN_TOKEN, 8], "max_tokens": 60}

    def stream(body: dict[str, Any]) -> tuple[list[int], dict[str, Any] | None]:
        with service.stream("/generate", {**body, "ignore_eos": True}) as events:
            *received, last, done = events
        assert done.payload is None
        assert last.payload is not None
        tokens = [t for event in (*received, last) for t in (event.payload or {})["token_ids"]]
        return tokens, last.payload.get("error")

    with Launched(tmp_path, env) as penstock, ServiceClient(penstock) as service:
        alone, _ = stream(good)
        assert len(alone) == 60
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(stream, [good, bad] * 6))
        begin_s = time.monotonic()
        assert stream(bad)[1] is not None
        # Told when it fails, not when the request's ten minutes are over.
        assert time.monotonic() - begin_s < 60
        service.until_idle()
        assert stream(good)[0] == alone
        job = service.http.get("/v1/jobs?state=failed&limit=1").json()["data"][0]
    for tokens, error in answers[::2]:
        assert error is None
        assert tokens == alone
    for tokens, error in answers[1::2]:
        assert tokens == []
        assert error is not None
        assert (error["type"], error["code"]) == ("server_error", "nonfinite_logits")
        assert error["message"]
    assert job["error"]["code"] == "nonfinite_logits"

"""GET /v1/jobs/{id}?prefix=true: why a prompt was cached, or computed again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from penstock.doctor.server import check_redis
from tests.support.running_service import MODEL, RunningService, wait_until

NUMBERS = random.Random()  # each test has prompts that no other one begins with


def run(client: httpx.Client, prompt: list[int], num_tokens: int = 4) -> dict[str, Any]:
    """The job of a completion of token ids."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return prefix_of(client, response.json()["id"])


def prefix_of(client: httpx.Client, job: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/jobs/{job}", params={"prefix": "true"}).json()
    return {"id": job, **found["prefix"]}


OTHER = 350  # than all of `ids`: the first of them may be what the worker says next


def ids(count: int) -> list[int]:
    return [NUMBERS.randrange(300, 350) for _ in range(count)]


def test_the_next_turn_has_the_earlier_prompt_and_output_in_common(
    service: RunningService, client: httpx.Client
) -> None:
    prompt = ids(150)
    first = run(client, prompt)
    service.script.cached_tokens = 144
    second = run(client, prompt + prompt[:4] + [OTHER])  # the worker repeats the prompt
    assert (second["cause"], second["earlier_job"]) == ("cached", first["id"])
    assert (second["same_tokens"], second["cached_tokens"]) == (154, 144)
    assert second["text"] is None


def test_the_same_tokens_that_were_not_cached_are_told_with_their_worker(
    client: httpx.Client,
) -> None:
    prompt = ids(150)
    run(client, prompt)
    second = run(client, [*prompt, OTHER])
    assert second["cause"] == "not_cached"
    assert (second["earlier_worker"], second["same_tokens"]) == ("w-scripted", 150)
    assert "w-scripted" in second["sentence"]


def test_a_date_that_changed_is_recognised_with_both_texts(
    service: RunningService, client: httpx.Client
) -> None:
    encode = service.text.tokenizer.encode
    mark, rest = ids(20), ids(200)
    parts = [encode(f"Today is 2026-11-{day} at the mill.") for day in ("26", "27")]
    first = run(client, mark + parts[0] + rest)
    second = run(client, mark + parts[1] + rest)
    assert (second["cause"], second["earlier_job"]) == ("date", first["id"])
    assert second["same_tokens"] >= len(mark)
    assert "26" in second["earlier_text"]
    assert "27" in second["text"]
    assert second["lost_tokens"] > len(rest)
    asked = asyncio.run(check_redis(service.settings.redis_url, service.settings.namespace))
    (finding,) = (finding for finding in asked if finding.check == "prefixes")
    assert f"after {second['same_tokens']} tokens" in finding.sentence
    assert "2026" not in finding.sentence  # no text of a prompt


def test_a_prompt_without_an_earlier_one_and_one_that_was_not_kept(
    service: RunningService, client: httpx.Client
) -> None:
    first = run(client, [NUMBERS.randrange(350, 384), *ids(20)])
    assert (first["cause"], first["earlier_job"]) == ("no_earlier_job", None)
    job_id = client.get(f"/v1/jobs/{first['id']}").json()["job_id"]
    service.call(service.transport.store.forget(job_id))
    assert client.get(f"/v1/jobs/{first['id']}", params={"prefix": "true"}).status_code == 404
    assert service.call(service.transport.prompts.tokens(job_id)) is None


def test_of_a_job_that_runs_it_is_not_known_yet(
    service: RunningService, client: httpx.Client
) -> None:
    service.script.starts = False
    body = {
        "model": MODEL,
        "prompt": ids(5),
        "max_tokens": 4,
        "stream": True,
        "on_disconnect": "continue",
    }
    with client.stream("POST", "/v1/completions", json=body) as response:
        job = response.headers["x-request-id"]
        wait_until(lambda: service.worker.jobs, "the job to run")
        assert prefix_of(client, job)["cause"] == "not_ended"
        service.script.starts = True
        response.read()


def test_it_is_said_only_on_request(client: httpx.Client) -> None:
    job = run(client, ids(5))
    assert client.get(f"/v1/jobs/{job['id']}").json()["prefix"] is None
    refused = client.get(f"/v1/jobs/{job['id']}", params={"prefix": "perhaps"})
    assert refused.status_code == 400
    assert "prefix" in refused.json()["error"]["param"]


def test_only_the_latest_prompts_are_kept(service: RunningService, client: httpx.Client) -> None:
    first = run(client, ids(5))
    body = {"model": MODEL, "prompt": [ids(3)] * 20, "max_tokens": 1}
    for _ in range(13):
        assert client.post("/v1/completions", json=body).status_code == 200
    kept = service.call(service.transport.prompts.list(1000))
    assert len(kept) <= 256
    assert first["id"].removeprefix("cmpl-") not in {record.job_id for record in kept}
    assert prefix_of(client, first["id"])["cause"] == "not_kept"

"""A service over several partitions, which its clients see as one."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from shared.keys import partition_of
from tests.support.metrics import Scrape
from tests.support.running_service import MODEL, RunningService, wait_until
from tests.support.service_fixtures import module_service

shared_service = module_service(partitions="3")

NUM_REQUESTS = 12


def ask(client: httpx.Client, number: int, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": f"number {number} ", "max_tokens": 8, "seed": 1}
    return client.post("/v1/completions", json=body, **more)


def partitions_of(ids: list[str]) -> Counter[int]:
    return Counter(partition_of(name.removeprefix("cmpl-")) for name in ids)


def test_requests_are_spread_and_each_gets_its_answer(
    client: httpx.Client, service: RunningService
) -> None:
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda n: ask(client, n).json(), range(NUM_REQUESTS)))
    for number, answer in enumerate(answers):
        assert answer["choices"][0]["text"].startswith(f"number {number}"[:4])
    assert partitions_of([answer["id"] for answer in answers]) == {0: 4, 1: 4, 2: 4}
    listed = client.get("/v1/jobs", params={"limit": 100}).json()["data"]
    assert {answer["id"] for answer in answers} <= {job["id"] for job in listed}
    for answer in answers:
        assert client.get(f"/v1/jobs/{answer['id']}").json()["status"] == "finished"
    health = client.get("/health").json()
    assert len(health["workers"]) == 1
    assert service.call(service.transport.registry.queue_stats()).totals["finished"] >= NUM_REQUESTS


def test_all_prompts_of_a_request_are_in_one_partition(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": ["one ", "two ", "three "], "max_tokens": 4, "seed": 1}
    before = {job["job_id"] for job in jobs_of(client)}
    assert client.post("/v1/completions", json=body).status_code == 200
    made = [job["job_id"] for job in jobs_of(client) if job["job_id"] not in before]
    assert len(made) == 3
    assert len(partitions_of(made)) == 1


def jobs_of(client: httpx.Client) -> list[dict[str, Any]]:
    return list(client.get("/v1/jobs", params={"limit": 1000}).json()["data"])


def test_a_key_stands_for_one_job(client: httpx.Client, service: RunningService) -> None:
    for number in range(6):
        headers = {"Idempotency-Key": f"key {number}"}
        first, second = (ask(client, number, headers=headers).json() for _ in range(2))
        assert first["id"] == second["id"]
    assert len(service.worker.seen) == 6


def test_the_rows_of_a_batch_are_spread(openai_client: OpenAI, service: RunningService) -> None:
    body = {"model": MODEL, "prompt": "row ", "max_tokens": 8, "seed": 1}
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in range(12)
    ]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    file = openai_client.files.create(file=("rows.jsonl", content), purpose="batch")
    batch = openai_client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    wait_until(
        lambda: openai_client.batches.retrieve(batch.id).status == "completed", "its end", 60
    )
    counts = openai_client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (12, 0)
    assert len(partitions_of([delivery.job.job_id for delivery in service.worker.seen])) == 3


def test_each_partition_has_its_figures_and_the_one_that_is_away_shows(
    client: httpx.Client, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        assert ask(client, number).status_code == 200
    up, jobs = "penstock:partition_up", "penstock:partition_jobs"
    commands, numbers = "penstock:partition_commands_total", ("0", "1", "2")

    def of_frontend() -> Scrape:
        return Scrape.of(f"{service.base_url}/metrics")

    def all_sampled() -> bool:
        seen = Scrape.of(f"{service.base_url}/metrics/deployment")
        states = {
            (labels["partition"], labels["state"]) for n, labels, _ in seen.samples if n == jobs
        }
        assert states == {(n, state) for n in numbers for state in ("queued", "running")}
        return all(seen.total(commands, partition=n) > 0 for n in numbers)

    assert [of_frontend().total(up, partition=n) for n in numbers] == [1, 1, 1]
    wait_until(all_sampled, "a sample of each server")
    lost = service.app.state.services.health._registry._partitions.all[1]
    with monkeypatch.context() as patched:
        patched.setattr(lost, "came_back", lambda: None)
        lost.left("a test")
        wait_until(lambda: of_frontend().total(up, partition="1") == 0, "it to be away")
        assert of_frontend().total(up) == 2
        assert ask(client, 1).status_code == 200
        with httpx.stream("GET", f"{service.base_url}/v1/deployment/stream") as stream:
            data = next(line for line in stream.iter_lines() if line.startswith("data: "))
        rows = json.loads(data.removeprefix("data: "))["lists"]["partitions"]["rows"]
        assert {n: row["is_away"] for n, row in rows.items()} == {"0": False, "1": True, "2": False}
    wait_until(lambda: of_frontend().total(up) == 3, "it to be back")

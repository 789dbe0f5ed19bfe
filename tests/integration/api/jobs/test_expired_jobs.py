"""An ended job that has expired is told as such, wherever it is asked for: 410, `job_expired`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI
from websockets.sync.client import connect

from tests.support.expired_jobs import expire_record, expire_text
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_frontend, running_service

BODY: dict[str, Any] = {"prompt": "a gate and a wheel ", "max_tokens": 5, "stream": False}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
}
KEYS = ";".join(
    f"sha256:{hashlib.sha256(f'sk-{name}'.encode()).hexdigest()} tenant={name}"
    for name in ("alice", "bob")
)
OF_TEXT = ("stream", "events", "text", "text?offset=-1&live=sse", "text?offset=-1&live=long-poll")


@pytest.fixture
def ended(client: httpx.Client) -> str:
    return str(client.post("/generate", json=BODY).json()["id"])


def expired(answer: httpx.Response) -> str:
    """The sentence of a 410."""
    assert answer.status_code == 410, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["code"] == "job_expired"
    assert "expired at 20" in error["message"]
    return str(error["message"])


@pytest.mark.promise(
    "Streaming: an ended job and its text are kept as long as the settings or its request ask, and "
    "expiry is a 410 `job_expired` with its time"
)
@pytest.mark.parametrize("path", OF_TEXT)
def test_a_text_that_has_expired_is_gone_and_its_record_is_not(
    client: httpx.Client, service: RunningService, ended: str, path: str
) -> None:
    before = client.get(f"/v1/jobs/{ended}").json()
    assert before["text_retained_until"] == before["retained_until"] > before["ended_at"]
    expire_text(service, ended)
    assert "PENSTOCK_TEXT_RETENTION_S" in expired(client.get(f"/v1/jobs/{ended}/{path}"))
    after = client.get(f"/v1/jobs/{ended}").json()
    assert after["status"] == "finished"
    assert after["text_retained_until"] < before["text_retained_until"]


def test_a_reader_who_has_all_of_an_expired_text_is_told_its_end(
    client: httpx.Client, service: RunningService, ended: str
) -> None:
    last = client.get(f"/v1/jobs/{ended}/events").json()["data"][-2]["id"]
    expire_text(service, ended)
    answer = client.get(f"/v1/jobs/{ended}/stream", headers={"last-event-id": last})
    assert answer.status_code == 200
    assert '"done":true' in answer.text


@pytest.mark.parametrize("path", ["", *(f"/{name}" for name in OF_TEXT)])
def test_a_job_whose_record_has_expired_is_gone(
    client: httpx.Client, service: RunningService, ended: str, path: str
) -> None:
    expire_record(service, ended)
    assert "PENSTOCK_JOB_RETENTION_S" in expired(client.get(f"/v1/jobs/{ended}{path}"))


def test_other_requests_for_an_expired_job_are_told_too(
    client: httpx.Client, service: RunningService, ended: str
) -> None:
    expire_record(service, ended)
    assert client.head(f"/v1/jobs/{ended}/text").status_code == 410
    expired(client.delete(f"/v1/jobs/{ended}"))
    expired(client.post(f"/v1/jobs/{ended}/stream-token"))


def test_a_stored_response_that_has_expired_is_gone(
    openai_client: OpenAI, client: httpx.Client, service: RunningService
) -> None:
    response = openai_client.responses.create(model=MODEL, input="hi", max_output_tokens=16)
    expire_record(service, response.id)
    for path in ("", "?stream=true", "/input_items"):
        sentence = expired(client.get(f"/v1/responses/{response.id}{path}"))
        assert "PENSTOCK_RESPONSE_TTL_S" in sentence
    with pytest.raises(APIStatusError) as caught:
        openai_client.responses.retrieve(response.id)
    assert (caught.value.status_code, caught.value.code) == (410, "job_expired")  # type: ignore[attr-defined]
    # A new turn of it: clients know this code, and send all items again.
    turn = {"model": MODEL, "input": "b", "previous_response_id": response.id}
    error = client.post("/v1/responses", json=turn).json()["error"]
    assert error["code"] == "previous_response_not_found"
    assert "expired at 20" in error["message"]
    with connect(f"{service.base_url.replace('http', 'ws', 1)}/v1/responses") as socket:
        socket.send(json.dumps({"type": "response.resume", "response_id": response.id}))
        told = json.loads(socket.recv(timeout=60))
    assert (told["status"], told["error"]["code"]) == (410, "job_expired")


def test_another_tenant_s_expired_job_does_not_exist(redis_url: str, checkpoint: Path) -> None:
    with running_service(redis_url, new_namespace(), checkpoint, api_keys=KEYS) as service:
        alice, bob = (
            httpx.Client(base_url=service.base_url, headers={"authorization": f"Bearer sk-{name}"})
            for name in ("alice", "bob")
        )
        with alice, bob:
            name = alice.post("/generate", json=BODY).json()["id"]
            expire_record(service, name)
            expired(alice.get(f"/v1/jobs/{name}"))
            refused = bob.get(f"/v1/jobs/{name}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "job_not_found")


def test_what_was_deleted_on_request_is_not_found(
    openai_client: OpenAI, client: httpx.Client
) -> None:
    response = openai_client.responses.create(model=MODEL, input="hi", max_output_tokens=16)
    openai_client.responses.delete(response.id)
    assert client.get(f"/v1/responses/{response.id}").status_code == 404
    assert client.get(f"/v1/jobs/{response.id}").status_code == 404


def kept_s(client: httpx.Client, name: str) -> tuple[float, float]:
    """For how long after its end a job and its text are kept."""
    job = client.get(f"/v1/jobs/{name}").json()
    found = job["retained_until"] - job["ended_at"], job["text_retained_until"] - job["ended_at"]
    return round(found[0]), round(found[1])


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", BODY),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {**BODY, "model": MODEL}),
        ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 16}),
    ],
)
def test_a_request_says_how_long_its_job_is_kept(
    client: httpx.Client, service: RunningService, route: str, body: dict[str, Any]
) -> None:
    def made(**members: Any) -> str:
        answer = client.post(route, json={**body, **members})
        assert answer.status_code == 200, answer.text
        assert "x-penstock-ignored" not in answer.headers
        return str(answer.json()["id"])

    assert kept_s(client, made()) == (3600, 3600)
    asked = {"anchor": "completed_at", "seconds": 7200}
    assert kept_s(client, made(expires_after=asked)) == (7200, 7200)
    assert kept_s(client, made(expires_after=asked, store=True)) == (7200, 7200)
    assert kept_s(client, made(store=True)) == (3600, 3600)
    record, text = kept_s(client, made(store=False))
    assert record == 3600
    assert text <= 600
    for wrong, param in (
        ({"anchor": "created_at", "seconds": 7200}, "expires_after.anchor"),
        ({"anchor": "completed_at", "seconds": 59}, "expires_after.seconds"),
        ({"anchor": "completed_at", "seconds": 86_401}, "expires_after.seconds"),
        ({"anchor": "completed_at"}, "expires_after.seconds"),
    ):
        refused = client.post(route, json={**body, "expires_after": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    refused = client.post(route, json={**body, "store": False, "expires_after": asked})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")


def test_a_frontend_keeps_its_jobs_by_its_own_settings(
    client: httpx.Client, service: RunningService
) -> None:
    """The worker ends the jobs of both."""
    settings = {"job_retention_s": 7200, "text_retention_s": 900, "max_retention_s": 1000}
    redis_url, namespace = service.settings.redis_url, service.settings.namespace
    with (
        running_frontend(redis_url, namespace, **settings) as other,
        httpx.Client(base_url=other.base_url) as second,
    ):
        other.until_ready()
        name = second.post("/generate", json=BODY).json()["id"]
        assert kept_s(client, name) == kept_s(second, name) == (7200, 900)
        asked = {"anchor": "completed_at", "seconds": 1001}
        assert second.post("/generate", json={**BODY, "expires_after": asked}).status_code == 400
        keyed = second.post("/generate", json=BODY, headers={"idempotency-key": "k"})
        assert kept_s(client, keyed.json()["id"]) == (600, 600)  # for who asks again

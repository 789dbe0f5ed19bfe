"""The jobs behind the answers: looked at, listed, cancelled and read along by anybody."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from tests.support.running_service import MODEL, RunningService, running_frontend, wait_until

PROMPT = {"prompt": "a gate and a wheel 😀 ", "max_tokens": 30}


def tail(client: httpx.Client, job_id: str, **options: Any) -> tuple[list[str], list[Any]]:
    """Ids and payloads of a job's stream, without its [DONE]."""
    ids, payloads = [], []
    with connect_sse(client, "GET", f"/v1/jobs/{job_id}/stream", **options) as source:
        for event in source.iter_sse():
            if event.data == "[DONE]":
                break
            ids.append(event.id)
            payloads.append(json.loads(event.data))
    return ids, payloads


@pytest.mark.promise("Engine: a job's state and token counts can be queried")
@pytest.mark.promise("Runtime: every reason has its code in the job and over HTTP")
@pytest.mark.promise("Runtime: the state can be read without consuming the stream")
def test_a_finished_job_has_its_whole_record(client: httpx.Client) -> None:
    answer = client.post(
        "/generate", json={**PROMPT, "stream": False}, headers={"x-client-request-id": "mine"}
    ).json()
    job = client.get(f"/v1/jobs/{answer['id']}").json()
    assert job["id"] == answer["id"]
    assert job["job_id"] == answer["id"].removeprefix("gen-")
    assert (job["object"], job["status"], job["kind"]) == ("job", "finished", "generate")
    assert (job["model"], job["worker"], job["attempt"]) == (MODEL, "w-scripted", 1)
    assert job["finish_reason"] == "length"
    assert job["usage"] == answer["usage"]
    assert job["error"] is None
    assert job["client_request_id"] == "mine"
    assert job["created_at"] <= job["started_at"] <= job["first_token_at"] <= job["ended_at"]
    assert 0 <= job["timings"]["queue_ms"] <= job["timings"]["total_ms"]
    assert client.get(f"/v1/jobs/{job['job_id']}").json() == job
    ended = client.get("/v1/jobs", params={"state": "completed"}).json()["data"]
    assert job in ended  # the word of earlier releases
    wait_until(
        lambda: (
            'penstock:jobs_ended_total{state="finished"}' in client.get("/metrics/deployment").text
        ),
        "the same word in the metrics",
    )


def test_waiting_jobs_know_their_place(client: httpx.Client, service: RunningService) -> None:
    service.park()
    body = {**PROMPT, "on_disconnect": "continue"}
    with (
        client.stream("POST", "/generate", json=body) as first,
        client.stream("POST", "/generate", json=body) as second,
    ):
        names = [first.headers["x-request-id"], second.headers["x-request-id"]]
        jobs = [client.get(f"/v1/jobs/{name}").json() for name in names]
        assert [job["status"] for job in jobs] == ["queued", "queued"]
        assert [job["queue_position"] for job in jobs] == [0, 1]
        wait_until(lambda: client.get("/health").json()["waiting"] == 2, "the count")
        listed = client.get("/v1/jobs?state=queued").json()["data"]
        assert {job["id"] for job in listed} == set(names)
        for name in names:
            assert client.delete(f"/v1/jobs/{name}").json()["status"] == "cancelled"


def test_lists_are_filtered_and_bounded(client: httpx.Client) -> None:
    for _ in range(3):
        client.post("/generate", json={**PROMPT, "stream": False})
    listed = client.get("/v1/jobs", params={"state": "completed", "limit": 2}).json()
    assert listed["object"] == "list"
    assert [job["status"] for job in listed["data"]] == ["finished"] * 2
    for query in ("state=done", "limit=0", "limit=x", "limit=99999", "order=asc", "state="):
        refused = client.get(f"/v1/jobs?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.promise("Runtime: cancel in every state, idempotent")
def test_cancelling_is_idempotent_in_every_state(
    client: httpx.Client, service: RunningService
) -> None:
    service.script.step_s = 0.2
    with client.stream("POST", "/generate", json={**PROMPT, "max_tokens": 400}) as running:
        name = running.headers["x-request-id"]
        wait_until(
            lambda: client.get(f"/v1/jobs/{name}").json()["usage"]["completion_tokens"], "tokens"
        )
        first = client.post(f"/v1/jobs/{name}/cancel").json()
        assert (first["status"], first["error"]["code"]) == ("cancelled", "cancelled")
        assert first["usage"]["completion_tokens"] > 0
        assert client.delete(f"/v1/jobs/{name}").json() == first
    service.script.step_s = 0
    done = client.post("/generate", json={**PROMPT, "stream": False}).json()
    assert client.delete(f"/v1/jobs/{done['id']}").json()["status"] == "finished"


@pytest.mark.parametrize("name", ["none", "0-nothing", "gen-0-abc", "a%20b", "x" * 3000])
def test_an_unknown_job_is_a_404(client: httpx.Client, name: str) -> None:
    for method, path in (
        ("GET", f"/v1/jobs/{name}"),
        ("DELETE", f"/v1/jobs/{name}"),
        ("POST", f"/v1/jobs/{name}/cancel"),
        ("GET", f"/v1/jobs/{name}/stream"),
    ):
        answer = client.request(method, path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "job_not_found"


def test_tokens_that_share_an_entry_of_the_log_are_sent_one_by_one(
    client: httpx.Client, service: RunningService
) -> None:
    received, name = [], ""
    for tokens_per_step in (1, 7):
        service.script.tokens_per_step = tokens_per_step
        with connect_sse(client, "POST", "/generate", json=PROMPT) as source:
            events = [json.loads(event.data) for event in source.iter_sse() if event.data[0] == "{"]
        name = events[0]["id"]
        received.append(([event["text"] for event in events], *tail(client, name)))
    assert received[0] == received[1]
    _, ids, payloads = received[1]
    for index, cursor in enumerate(ids[:-1]):  # most of them lie within an entry
        _, rest = tail(client, name, headers={"last-event-id": cursor})
        assert rest == payloads[index + 1 :]


def test_a_finished_job_can_be_read_from_any_cursor(client: httpx.Client) -> None:
    answer = client.post("/generate", json={**PROMPT, "stream": False}).json()
    ids, payloads = tail(client, answer["id"])
    assert "".join(payload["text"] for payload in payloads) == answer["text"]
    assert payloads[-1]["done"]
    assert payloads[-1]["usage"] == answer["usage"]
    for index, cursor in enumerate(ids[:-1]):
        _, rest = tail(client, answer["id"], headers={"last-event-id": cursor})
        assert rest == payloads[index + 1 :]
    _, by_query = tail(client, answer["id"], params={"after": ids[0]})
    assert by_query == payloads[1:]
    nothing_left = client.get(f"/v1/jobs/{answer['id']}/stream", headers={"last-event-id": ids[-1]})
    assert nothing_left.status_code == 204
    assert nothing_left.headers["x-request-id"] == answer["id"]


@pytest.mark.parametrize(
    "cursor", ["x", "1", "1-", "-1-2", "1-2-3", "9" * 50 + "-1", "١-٢", "1-2.", "1-2.128-0-0"]
)
def test_an_invalid_cursor_is_a_400(client: httpx.Client, cursor: str) -> None:
    answer = client.post("/generate", json={**PROMPT, "stream": False}).json()
    refused = client.get(
        f"/v1/jobs/{answer['id']}/stream", headers={"last-event-id": cursor.encode()}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Last-Event-ID"


def test_a_second_reader_neither_disturbs_nor_cancels(
    client: httpx.Client, service: RunningService
) -> None:
    service.script.step_s = 0.02
    with connect_sse(client, "POST", "/generate", json=PROMPT) as source:
        events = source.iter_sse()
        first = json.loads(next(events).data)
        with client.stream("GET", f"/v1/jobs/{first['id']}/stream") as leaving:
            assert next(leaving.iter_raw())
        _, payloads = tail(client, first["id"])
        pieces = [first, *(json.loads(event.data) for event in events if event.data != "[DONE]")]
    assert pieces[-1]["finish_reason"] == "length"
    assert "".join(payload["text"] for payload in payloads) == pieces[-1]["full_text"]


def test_a_stream_goes_on_at_another_frontend(
    client: httpx.Client,
    service: RunningService,
    redis_url: str,
) -> None:
    service.script.step_s = 0.02
    body = {**PROMPT, "on_disconnect": "grace", "max_tokens": 60}
    with (
        running_frontend(redis_url, service.settings.namespace) as other_frontend,
        httpx.Client(base_url=other_frontend.base_url, timeout=20) as other,
    ):
        with client.stream("POST", "/generate", json=body) as leaving:
            name = leaving.headers["x-request-id"]
            ids, payloads = [], []
            with connect_sse(client, "GET", f"/v1/jobs/{name}/stream") as source:
                for event in source.iter_sse():
                    ids.append(event.id)
                    payloads.append(json.loads(event.data))
                    if len(ids) == 5:
                        break
        _, rest = tail(other, name, headers={"last-event-id": ids[-1]})
        assert rest[-1]["done"]
        text = "".join(payload["text"] for payload in (*payloads, *rest))
        _, whole = tail(other, name)
        assert text == "".join(payload["text"] for payload in whole)
        assert other.get(f"/v1/jobs/{name}").json()["status"] == "finished"


def test_the_end_of_a_cancelled_job_is_sent_once(
    client: httpx.Client, service: RunningService
) -> None:
    service.script.step_s = 0.2
    with client.stream("POST", "/generate", json={**PROMPT, "max_tokens": 400}) as running:
        name = running.headers["x-request-id"]
        client.delete(f"/v1/jobs/{name}")
    ids, payloads = tail(client, name)
    assert payloads[-1]["error"]["code"] == "cancelled"
    again = client.get(f"/v1/jobs/{name}/stream", headers={"last-event-id": ids[-1]})
    assert again.status_code == 204  # where an EventSource stops coming back

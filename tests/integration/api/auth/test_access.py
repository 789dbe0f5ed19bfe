"""Keys: who is let in, as whom, to what, and how much of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from httpx_sse import connect_sse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from api.auth.keys import digest_of, new_key
from tests.support.keys import Keys
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    MODEL,
    RunningService,
    running_frontend,
    running_service,
    wait_until,
)
from tests.support.service_fixtures import module_service, service
from tests.support.table import table

anthropic = lazy_import("anthropic")

KEYS = Keys(
    acme="name=first",
    other="",
    operator="tenant=ops operator",
    disabled="tenant=acme disabled",
    few="requests_per_minute=2",
    one="max_jobs=1",
    little="tokens_per_minute=50",
)
ACME, OTHER, OPERATOR, DISABLED, FEW, ONE, LITTLE = KEYS.values()
LINES = KEYS.lines
METRICS_KEY = "for the scraper alone"
PROMPT = {"prompt": "a gate and a wheel", "max_tokens": 8}
FREE = ("/", "/dashboard", "/docs", "/redoc", "/static/service.js", "/ready", "/openapi.json")


shared_service = module_service(api_keys=LINES, metrics_key=METRICS_KEY)
keyed = service


def client_of(service: RunningService, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=service.base_url, headers=headers, timeout=20)


@pytest.fixture
def acme(keyed: RunningService) -> Iterator[httpx.Client]:
    with client_of(keyed, ACME) as client:
        yield client


@pytest.fixture
def operator(keyed: RunningService) -> Iterator[httpx.Client]:
    with client_of(keyed, OPERATOR) as client:
        yield client


@pytest.fixture
def anonymous(keyed: RunningService) -> Iterator[httpx.Client]:
    with client_of(keyed, None) as client:
        yield client


def generated(client: httpx.Client, **more: Any) -> str:
    """The id of an answer, which is its job's."""
    answer = client.post("/generate", json={**PROMPT, "stream": False, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


@pytest.mark.promise(
    "Access: every route requires a key, hashed at rest, except the service's own pages and probes "
    "(`/metrics`, `/metrics/deployment` and the details of `/health` too)"
)
@table(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/generate"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("GET", "/v1/jobs"),
        ("GET", "/v1/jobs/gen-0-x"),
        ("GET", "/v1/jobs/gen-0-x/stream"),
        ("GET", "/v1/dead-letters"),
        ("GET", "/v1/files"),
        ("GET", "/v1/batches"),
        ("GET", "/metrics"),
        ("GET", "/no/such/route"),
    ],
)
@table(
    "headers",
    [
        {},
        {"authorization": f"Bearer {new_key()}"},
        {"authorization": f"Basic {ACME}"},
        {"authorization": "Bearer"},
        {"x-api-key": "x" * 2000},
        {"authorization": f"Bearer {new_key()}", "x-api-key": ACME},
    ],
)
def test_a_request_without_a_known_key_is_refused(
    anonymous: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = anonymous.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert ACME not in answer.text


@pytest.mark.parametrize("path", FREE)
def test_the_services_own_pages_need_no_key(anonymous: httpx.Client, path: str) -> None:
    assert anonymous.get(path).status_code == 200


def test_metrics_have_a_key_of_their_own(anonymous: httpx.Client, acme: httpx.Client) -> None:
    assert acme.get("/metrics").status_code == 401
    headers = {"authorization": f"Bearer {METRICS_KEY}"}
    assert anonymous.get("/metrics", headers=headers).status_code == 200
    assert anonymous.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_without_a_key_is_for_probes_alone(
    anonymous: httpx.Client, acme: httpx.Client, operator: httpx.Client, method: str
) -> None:
    assert anonymous.request(method, "/health").status_code == 200
    assert acme.request(method, "/health").status_code == 200
    assert anonymous.get("/health").json() == {"status": "ok"}  # not even what loads
    models = {MODEL: {"workers": 1}}
    assert acme.get("/health").json() == {"status": "ok", "models": models, "loading": []}
    assert operator.get("/health").json()["workers"][0]["id"] == "w-scripted"
    assert operator.get("/health").json()["models"][MODEL] == {"waiting": 0, "workers": 1}
    for headers in ({"x-api-key": "wrong"}, {"authorization": f"Bearer {METRICS_KEY}"}):
        assert anonymous.request(method, "/health", headers=headers).status_code == 401
    disabled = anonymous.request(method, "/health", headers={"x-api-key": DISABLED})
    assert disabled.status_code == 403


@pytest.mark.parametrize("path", ["/metrics", "/metrics/deployment"])
def test_metrics_without_a_key_of_their_own_are_the_operators(redis_url: str, path: str) -> None:
    with running_frontend(redis_url, new_namespace(), api_keys=LINES) as closed:
        for key, expected in (
            (None, (401, "invalid_api_key")),
            (ACME, (403, "operator_required")),
            (OPERATOR, (200, None)),
        ):
            with client_of(closed, key) as client:
                answer = client.get(path)
            code = None if answer.status_code == 200 else answer.json()["error"]["code"]
            assert (answer.status_code, code) == expected


def test_where_there_is_one_tenant_its_keys_see_everything(redis_url: str) -> None:
    lines = f"{digest_of(ACME)} tenant=acme; {digest_of(OTHER)} tenant=acme name=second"
    with (
        running_frontend(redis_url, new_namespace(), api_keys=lines) as closed,
        client_of(closed, OTHER) as acme,
    ):
        assert acme.get("/metrics").status_code == 200
        assert acme.get("/health").json()["workers"] == []
        with connect_sse(acme, "GET", "/v1/deployment/stream") as source:
            shown = json.loads(next(source.iter_sse()).data)
        assert {"history", "frontends"} <= shown["lists"].keys()


def test_the_feed_of_a_tenant_has_its_own_numbers(
    keyed: RunningService, acme: httpx.Client, operator: httpx.Client
) -> None:
    keyed.script.step_s = 0.1

    def shown(client: httpx.Client) -> dict[str, Any]:
        with connect_sse(client, "GET", "/v1/deployment/stream") as source:
            return dict(json.loads(next(source.iter_sse()).data))

    with (
        client_of(keyed, OTHER) as other,
        other.stream("POST", "/generate", json={**PROMPT, "max_tokens": 400}) as running,
    ):
        lines = running.iter_lines()  # kept: one that is dropped ends the stream
        next(lines)
        own, others, all_of_them = shown(acme), shown(other), shown(operator)
        other.delete(f"/v1/jobs/{running.headers['x-request-id']}")
    assert own["service"]["running"] + own["service"]["waiting"] == 0
    assert others["service"]["running"] + others["service"]["waiting"] == 1
    for seen in (own, others):
        assert seen["service"].keys() == {
            *("status", "is_operator", "now", "workers", "running", "waiting", "queued_tokens")
        }
        assert not seen["lists"].keys() & {"history", "frontends"}
        for worker in seen["lists"]["workers"]["rows"].values():
            assert worker.keys() <= {
                *("id", "status", "models", "engine", "engine_version", "beat_age_ms")
            }
    assert {"history", "frontends"} <= all_of_them["lists"].keys()
    assert "tokens_per_s" in all_of_them["service"]


@table("method", ["GET", "HEAD", "POST"])
@table(
    "path",
    [
        *("/metrics%0a", "/metrics%0A", "/metrics/deployment%0a", "/ready%0a", "/v1/jobs%00"),
        *("/v1/chat/completions%0a", "/v1/messages%0a", "/v1/models/%c2%85", "/v1/jobs?state=%1b"),
    ],
)
def test_control_characters_are_refused_before_a_route_is_found(
    acme: httpx.Client, method: str, path: str
) -> None:
    answer = acme.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 400
    assert answer.headers["x-request-id"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    if method != "HEAD":
        body = answer.json()["error"]
        assert "control character" in body["message"]


@pytest.mark.parametrize("path", [*FREE, "/health", "/v1/jobs", "/no/such/route", "/v1/files/x"])
def test_no_answer_is_read_as_another_type(anonymous: httpx.Client, path: str) -> None:
    assert anonymous.get(path).headers["x-content-type-options"] == "nosniff"


class _KeysFile:
    """A file of keys that changes while streams are open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(LINES)

    def write(self, lines: str) -> None:
        self.path.write_text(lines)
        seen = self.path.stat()
        os.utime(self.path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("flags", "line", "token_status"),
    [
        ("tenant=acme", "", 401),
        ("tenant=acme", "tenant=acme disabled", 401),
        ("tenant=acme", "tenant=other", 401),
        ("tenant=acme operator", "tenant=other", 401),
        ("tenant=acme operator", "tenant=acme", 200),  # it may still see the job of the token
        ("tenant=acme operator", "tenant=other operator", 200),
    ],
)
def test_a_key_that_is_revoked_or_changed_ends_what_it_has_opened(
    redis_url: str, checkpoint: Path, tmp_path: Path, flags: str, line: str, token_status: int
) -> None:
    keys = _KeysFile(tmp_path / "keys")
    digest, others_lines = digest_of(ACME), LINES.partition("\n")[2]
    keys.write(f"{digest} {flags}\n{others_lines}")
    changed = f"{digest} {line}\n{others_lines}" if line else others_lines
    with (
        running_service(
            redis_url, new_namespace(), checkpoint, api_keys="", api_keys_file=str(keys.path)
        ) as service,
        client_of(service, ACME) as acme,
        client_of(service, OPERATOR) as operator,
        client_of(service, None) as anonymous,
    ):
        service.script.step_s = 0.1
        body = {**PROMPT, "max_tokens": 400}
        with (
            acme.stream("POST", "/generate", json=body) as stream,
            connect_sse(acme, "GET", "/v1/deployment/stream") as feed,
            operator.stream("POST", "/generate", json=body) as others,
        ):
            name = stream.headers["x-request-id"]
            others_name = others.headers["x-request-id"]
            token = acme.post(f"/v1/jobs/{name}/stream-token").json()["url"]
            socket_url = str(acme.base_url).replace("http", "ws", 1) + "/v1/responses"
            authorization = {"authorization": f"Bearer {ACME}"}
            with (
                connect_sse(anonymous, "GET", token) as by_token,
                connect(socket_url, additional_headers=authorization) as socket,
            ):
                keys.write(changed)
                with pytest.raises(ConnectionClosed, match="no longer valid"):
                    socket.recv(timeout=30)
                ends = [
                    list(stream.iter_lines())[-4:],
                    [event.data for event in feed.iter_sse()][-1:],
                ]
                end_of_token = [event.data for event in by_token.iter_sse()][-2:]
            assert anonymous.get(token).status_code == token_status
            assert operator.get(f"/v1/jobs/{others_name}").json()["status"] == "running"
            wait_until(
                lambda: operator.get(f"/v1/jobs/{name}").json()["status"] == "cancelled",
                "the job of the key to be cancelled",
            )
            operator.delete(f"/v1/jobs/{others_name}")
        for end in ends:
            assert any("no longer valid" in line for line in end), end
        assert any("no longer valid" in line for line in end_of_token) == (token_status == 401)


@pytest.mark.parametrize("metrics_key", ["", METRICS_KEY])
def test_monitoring_may_be_opened(redis_url: str, metrics_key: str) -> None:
    with (
        running_frontend(
            redis_url,
            new_namespace(),
            api_keys=LINES,
            metrics_key=metrics_key,
            monitoring_without_keys=True,
        ) as opened,
        client_of(opened, None) as anonymous,
    ):
        assert anonymous.get("/health").json()["workers"] == []
        assert anonymous.get("/metrics").status_code == (401 if metrics_key else 200)
        assert anonymous.get("/v1/models").status_code == 401


def test_with_keys_any_origin_and_any_host_may_come(anonymous: httpx.Client) -> None:
    """A page of a foreign site has no key, and its browser keeps none for it."""
    headers = {"host": "penstock.example", "origin": "https://app.example"}
    assert anonymous.get("/ready", headers=headers).status_code == 200
    params = anonymous.get("/v1/models", headers=headers | {"x-api-key": ACME})
    assert params.status_code == 200
    assert params.headers["access-control-allow-origin"] == "*"


def test_a_key_comes_as_either_header(keyed: RunningService, anonymous: httpx.Client) -> None:
    assert anonymous.get("/v1/models", headers={"x-api-key": ACME}).status_code == 200
    assert (
        anonymous.get("/v1/models", headers={"authorization": f"bearer {ACME}"}).status_code == 200
    )
    with openai.OpenAI(base_url=f"{keyed.base_url}/v1", api_key=ACME) as sdk:
        assert [model.id for model in sdk.models.list()] == [MODEL]
    with (
        openai.OpenAI(base_url=f"{keyed.base_url}/v1", api_key="sk-wrong") as sdk,
        pytest.raises(openai.AuthenticationError),
    ):
        sdk.models.list()
    send: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "water"}],
    }
    with anthropic.Anthropic(base_url=keyed.base_url, api_key=ACME) as theirs:
        assert theirs.messages.create(**send).usage.output_tokens > 0
    with (
        anthropic.Anthropic(base_url=keyed.base_url, api_key="wrong") as theirs,
        pytest.raises(anthropic.AuthenticationError),
    ):
        theirs.messages.create(**send)


def test_a_disabled_key_is_forbidden(keyed: RunningService) -> None:
    with client_of(keyed, DISABLED) as client:
        answer = client.get("/v1/models")
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "key_disabled"


def test_a_preflight_needs_no_key_and_a_browser_may_read_the_refusal(
    anonymous: httpx.Client,
) -> None:
    params = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-api-key",
    }
    assert anonymous.options("/v1/chat/completions", headers=params).status_code == 200
    refused = anonymous.get("/v1/models", headers={"origin": "https://example.org"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"


def test_another_tenants_items_cannot_be_referred_to(
    keyed: RunningService, acme: httpx.Client
) -> None:
    params = {"model": MODEL, "input": "water", "max_output_tokens": 4}
    made = acme.post("/v1/responses", json=params).json()
    own = {**params, "input": [{"type": "item_reference", "id": made["output"][0]["id"]}]}
    assert acme.post("/v1/responses", json=own).status_code == 200
    with client_of(keyed, OTHER) as other, client_of(keyed, OPERATOR) as operator:
        for client in (other, operator):
            refused = client.post("/v1/responses", json=own)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "item_not_found"


@pytest.mark.promise("Access: a tenant sees nothing of another's (404)")
def test_another_tenants_jobs_are_not_there(keyed: RunningService, acme: httpx.Client) -> None:
    name = generated(acme)
    assert acme.get(f"/v1/jobs/{name}").json()["tenant"] == "acme"
    with client_of(keyed, OTHER) as other, client_of(keyed, OPERATOR) as operator:
        for method, path in (
            ("GET", f"/v1/jobs/{name}"),
            ("DELETE", f"/v1/jobs/{name}"),
            ("POST", f"/v1/jobs/{name}/cancel"),
            ("GET", f"/v1/jobs/{name}/stream"),
            ("GET", f"/v1/jobs/{name}/events"),
            ("GET", f"/v1/jobs/{name}/prompt"),
            ("GET", f"/v1/jobs/{name}/answer"),
            ("POST", f"/v1/jobs/{name}/stream-token"),
            ("POST", f"/v1/jobs/{name}/requeue"),
        ):
            assert other.request(method, path).status_code == 404, path
        assert name not in [job["id"] for job in other.get("/v1/jobs").json()["data"]]
        own = generated(other)
        assert [job["id"] for job in other.get("/v1/jobs?limit=1").json()["data"]] == [own]
        seen = {job["id"] for job in operator.get("/v1/jobs?limit=100").json()["data"]}
        assert seen >= {name, own}
        for path in ("", "/prompt", "/answer"):
            assert operator.get(f"/v1/jobs/{name}{path}").status_code == 200
        token = acme.post(f"/v1/jobs/{name}/stream-token").json()["token"]
        for path in ("prompt", "answer"):  # a token opens the stream alone
            refused = httpx.get(f"{keyed.base_url}/v1/jobs/{name}/{path}?token={token}")
            assert refused.status_code == 401


@pytest.mark.promise("Access: a native `EventSource` reads a stream with a token in its URL")
def test_a_token_opens_one_stream_for_a_client_that_cannot_send_a_key(
    acme: httpx.Client, anonymous: httpx.Client
) -> None:
    name, another = generated(acme), generated(acme)
    made = acme.post(f"/v1/jobs/{name}/stream-token").json()
    assert 0 < made["expires_at"] - time.time() <= 601
    with connect_sse(anonymous, "GET", made["url"]) as source:
        *_, last = [event for event in source.iter_sse() if event.data != "[DONE]"]
    assert json.loads(last.data)["done"]
    gone = anonymous.get(made["url"], headers={"last-event-id": last.id})
    assert gone.status_code == 204  # as an EventSource comes back
    token = made["token"]
    ends, mac, key_id, tenant = token.split(".")
    for path in (
        f"/v1/jobs/{another}/stream?token={token}",
        f"/v1/jobs/{name}?token={token}",
        f"/v1/jobs?token={token}",
        f"/v1/jobs/{name}/stream?token={int(ends) + 1}.{mac}.{key_id}.{tenant}",
        f"/v1/jobs/{name}/stream?token={ends}.{mac}.{key_id}.other",
        f"/v1/jobs/{name}/stream?token={ends}.{mac}.{'0' * 16}.{tenant}",
        f"/v1/jobs/{name}/stream?token={ends}.{mac[:-1]}.{key_id}.{tenant}",
        f"/v1/jobs/{name}/stream?token=",
        f"/v1/jobs/{name}/stream?token=1.é.acme",
        f"/v1/jobs/{name}/stream?token={'9' * 300}.x.acme",
    ):
        assert anonymous.get(path).status_code == 401, path
    assert anonymous.delete(f"/v1/jobs/{name}/stream?token={token}").status_code == 401


@pytest.mark.promise(
    "Access: a tenant's limits hold under concurrency, and unused allowance is returned"
)
def test_requests_in_a_minute_are_counted_for_the_tenant(
    keyed: RunningService, acme: httpx.Client
) -> None:
    with client_of(keyed, FEW) as few:
        for _ in range(2):
            generated(few)
        refused = few.post("/generate", json=PROMPT)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert few.get("/v1/jobs").status_code == 200  # looking costs nothing
        assert few.post("/generate", json={**PROMPT, "max_tokens": -1}).status_code == 400
    generated(acme)


def test_tokens_are_charged_as_they_are_taken(keyed: RunningService) -> None:
    with client_of(keyed, LITTLE) as little:
        # Each reserves most of the minute, and gives back what it does not take.
        for _ in range(3):
            generated(little, prompt="gate", max_tokens=40, stop=["g"])
        refused = little.post("/generate", json={"prompt": "gate", "max_tokens": 50})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_jobs_at_once_are_limited(keyed: RunningService) -> None:
    keyed.script.step_s = 0.1
    with (
        client_of(keyed, ONE) as one,
        one.stream("POST", "/generate", json={**PROMPT, "max_tokens": 400}) as running,
    ):
        refused = one.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        name = running.headers["x-request-id"]
        one.delete(f"/v1/jobs/{name}")
        wait_until(
            lambda: one.post("/generate", json={**PROMPT, "stream": False}).status_code == 200,
            "the next to be let in",
        )


def test_a_tenants_prefix_cache_is_its_own(keyed: RunningService, acme: httpx.Client) -> None:
    keyed.worker.seen.clear()
    generated(acme)
    assert [delivery.job.tenant for delivery in keyed.worker.seen] == ["acme"]


def test_a_prefix_is_compared_with_jobs_of_the_same_tenant_alone(keyed: RunningService) -> None:
    prompt = {"prompt": "the wheel of the mill turns by the water of the gate", "max_tokens": 2}

    def get(path: str, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{keyed.base_url}{path}", headers=headers, timeout=60)

    def run(key: str) -> str:
        headers = {"authorization": f"Bearer {key}"}
        body = {**prompt, "stream": False}
        answer = httpx.post(f"{keyed.base_url}/generate", json=body, headers=headers, timeout=60)
        return f"/v1/jobs/{answer.json()['id']}?prefix=true"

    first, others, again = run(ACME), run(OTHER), run(ACME)
    assert get(others, OTHER).json()["prefix"]["earlier_job"] is None
    compared = get(again, ACME).json()["prefix"]
    assert compared["earlier_job"] in first
    assert get(again, OPERATOR).json()["prefix"] == compared
    assert get(again, OTHER).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/jobs/cancel", {"filter": {}}),
        ("/v1/dead-letters/requeue", {"filter": {}}),
        ("/v1/workers/w-scripted/drain", None),
        ("/v1/workers/w-scripted/resume", None),
        (f"/v1/models/{MODEL}/pause", None),
        (f"/v1/models/{MODEL}/resume", None),
    ],
)
def test_what_changes_the_deployment_is_for_operators(
    acme: httpx.Client, operator: httpx.Client, path: str, body: dict[str, Any] | None
) -> None:
    refused = acme.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_required")
    assert operator.post(path, json=body).status_code == 200
    operator.post("/v1/workers/w-scripted/resume")
    operator.post(f"/v1/models/{MODEL}/resume")


def test_a_tenant_searches_among_its_own_jobs(
    keyed: RunningService, acme: httpx.Client, operator: httpx.Client
) -> None:
    with client_of(keyed, OTHER) as other:
        own, others = generated(acme), generated(other)

    def found(client: httpx.Client, **query: str) -> set[str]:
        return {job["id"] for job in client.get("/v1/jobs", params=query).json()["data"]}

    assert found(acme, id=own) == {own}
    assert found(acme, id=others) == found(acme, tenant="other") == set()
    assert found(operator, id=others, tenant="other") == {others}
    assert found(operator, id=others, tenant="acme") == set()

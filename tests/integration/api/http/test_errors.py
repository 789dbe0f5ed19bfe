"""Every row of the table of errors; every answer has a name; browsers can read them all."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    MODEL,
    running_frontend,
    running_service,
)

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, checked for what every answer must have."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"]
    return dict(body["error"])


def test_parameters_without_effect_are_accepted(client: httpx.Client) -> None:
    inert = {
        "n": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "logprobs": None,
        "top_logprobs": 0,
        "seed": None,
        "frobnicate": None,
    }
    assert client.post("/v1/chat/completions", json={**CHAT, **inert}).status_code == 200
    inert = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "user": "me"}
    assert client.post("/v1/completions", json={**COMPLETION, **inert}).status_code == 200


def test_unknown_routes_have_error_objects(client: httpx.Client) -> None:
    assert error_of(client.get("/v2/nothing"), 404)["code"] == "not_found"
    assert error_of(client.get("/v1/chat/completions//"), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/responses/search", "/v1/responses/x/cancel", "/v1/responses/0-x/unknown"),
        *("/v1/jobs/x", "/v1/jobs/x/stream", "/v1/dead-letters/x"),
        *("/v1/files/x", "/v1/files/x/content", "/v1/batches/x"),
        *("/v1/batches/x/cancel", "/v1/audio/speech", "/v1/conversations"),
    ],
)
def test_what_is_not_served_is_a_404_by_any_method(client: httpx.Client, path: str) -> None:
    for method in ("PUT", "PATCH", "TRACE", "POST", "GET", "DELETE"):
        refused = client.request(method, path)
        error = error_of(refused, 404)
        assert "allow" not in refused.headers
        if error["code"] == "not_found":
            assert error["message"] == f"Route not found: {method} {path}."
        else:  # of a route that is served
            assert re.match("(No (job|file|batch|dead letter)|Response with)", error["message"])


def test_what_can_be_an_id_has_the_methods_of_its_routes(client: httpx.Client) -> None:
    assert client.get("/v1/responses/compact").headers["allow"] == "POST"
    for path, allowed in {
        "/v1/responses/resp_0-x": "DELETE, GET",
        "/v1/responses/compact": "POST",
        "/v1/responses/0-x/cancel": "POST",
        "/v1/jobs/gen-0-x": "DELETE, GET",
        "/v1/files/file-0-x": "DELETE, GET",
        "/v1/batches/batch_0-x": "DELETE, GET",
        "/v1/models/any/name": "GET",
        "/static/any": "GET, HEAD",
    }.items():
        refused = client.put(path)
        message = error_of(refused, 405)["message"]
        assert message == f"Method not allowed: PUT. This route has {allowed}."
        assert refused.headers["allow"] == allowed


def test_a_deadline_that_passes_in_the_queue_is_a_504(
    redis_url: str,
    checkpoint: Any,
) -> None:
    with running_service(redis_url, new_namespace(), checkpoint, request_timeout_s=0.3) as hasty:
        hasty.park()
        late = httpx.post(
            f"{hasty.base_url}/generate", json={"prompt": "a", "stream": False}, timeout=20
        )
        error = error_of(late, 504)
        assert (error["type"], error["code"]) == ("timeout", "queue_timeout")
        job = httpx.get(f"{hasty.base_url}/v1/jobs/{late.headers['x-request-id']}").json()
        assert job["status"] == "expired"


def test_each_response_has_a_name(client: httpx.Client) -> None:
    assert len({client.get("/health").headers["x-request-id"] for _ in range(3)}) == 3


def test_what_is_not_even_http_gets_an_error_object(client: httpx.Client) -> None:
    answer = client.get("/health", headers={"x-bad": b"\x01"})
    assert error_of(answer, 400)["code"] == "invalid_http"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/jobs/none", "/nope"])
def test_a_browser_may_read_every_answer(client: httpx.Client, path: str) -> None:
    answer = client.get(path, headers={"origin": "http://localhost:3000"})
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert answer.headers["vary"] == "Origin"
    exposed = answer.headers["access-control-expose-headers"]
    names = {"x-request-id", "retry-after", "x-should-retry", "x-penstock-durability"}
    names.add("x-penstock-ignored")
    names |= {"x-ratelimit-remaining-requests", "x-ratelimit-reset-tokens"}
    names |= {"anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-tokens-reset"}
    assert names <= set(exposed.split(", "))


def test_a_preflight_allows_what_the_sdks_send(client: httpx.Client) -> None:
    params = (
        "authorization,content-type,x-stainless-lang,x-stainless-retry-count,last-event-id,"
        "idempotency-key,x-request-id,x-client-request-id,user-agent,openai-organization"
    )
    answer = client.options(
        "/v1/chat/completions",
        headers={
            "origin": "http://localhost:3000",
            "access-control-request-method": "POST",
            "access-control-request-headers": params,
        },
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert answer.headers["access-control-allow-headers"] == params
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_only_listed_origins_may_call_where_there_is_a_list(
    redis_url: str,
) -> None:
    listed = "https://a.example, https://b.example"
    with running_frontend(redis_url, new_namespace(), cors_origins=listed) as strict:
        url = f"{strict.base_url}/health"
        friend = httpx.get(url, headers={"origin": "https://b.example"})
        assert friend.headers["access-control-allow-origin"] == "https://b.example"
        assert friend.headers["vary"] == "Origin"
        for origin in ("https://c.example", "http://localhost:3000", "null"):
            stranger = httpx.get(url, headers={"origin": origin})
            assert error_of(stranger, 403)["code"] == "origin_not_allowed"
            assert "access-control-allow-origin" not in stranger.headers
        preflight = httpx.options(
            url,
            headers={"origin": "https://c.example", "access-control-request-method": "GET"},
        )
        assert error_of(preflight, 403)["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in preflight.headers


def test_a_slow_body_is_given_up(redis_url: str) -> None:
    with running_frontend(redis_url, new_namespace(), body_timeout_s=0.2) as impatient:
        with impatient.connect() as connection:
            connection.sendall(
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            )
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"x-should-retry: false" in answer

"""The Anthropic Python SDK against the real app: what its users do, unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    MODEL,
    RunningService,
    running_frontend,
    running_service,
    wait_until,
)

anthropic = lazy_import("anthropic")

QUESTION: Any = [{"role": "user", "content": "The keeper counts to sixty, héllo 😀."}]
PARAMS: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
# The worker repeats the prompt: as the template writes it, without its special tokens.
ECHOED = "user\nThe keeper counts to sixty, héllo 😀."


@pytest.fixture
def client(service: RunningService) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.base_url, api_key="none", max_retries=0) as made:
        yield made


def blocks_of(message: anthropic.types.Message) -> list[dict[str, object]]:
    return [block.to_dict() for block in message.content]


@pytest.mark.promise(
    "Clients: Anthropic's SDK works unchanged: messages, streams, tools and their loop, thinking, "
    "counting, models"
)
def test_a_message_and_its_stream_say_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**PARAMS)
    assert whole.id.startswith("msg_")
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    assert whole._request_id == whole.id
    (block,) = whole.content
    assert block.type == "text"
    assert block.text
    with client.messages.stream(**PARAMS) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert blocks_of(final) == blocks_of(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.to_dict() == whole.usage.to_dict()
    assert whole.usage.output_tokens == 24
    assert final.id != whole.id


def test_a_stream_ends_with_the_usage_of_the_whole_message_where_its_prefix_is_cached(
    service: RunningService, client: anthropic.Anthropic
) -> None:
    uncached = client.messages.create(**PARAMS).usage
    assert uncached.cache_read_input_tokens == 0
    service.script.cached_tokens = 16
    whole = client.messages.create(**PARAMS).usage
    with client.messages.stream(**PARAMS) as stream:
        started = next(event for event in stream if event.type == "message_start")
        at_start = started.message.usage.to_dict()  # the SDK changes it in place
        final = stream.get_final_message().usage
    assert whole.cache_read_input_tokens == 16
    assert final.to_dict() == whole.to_dict()
    total = final.input_tokens + final.cache_read_input_tokens
    assert total == uncached.input_tokens
    assert at_start["cache_read_input_tokens"] == 16
    assert at_start["input_tokens"] == final.input_tokens


def test_the_same_stream_again_begins_with_the_same_event(
    service: RunningService, client: anthropic.Anthropic
) -> None:
    service.script.cached_tokens = 16
    body, headers = {**PARAMS, "stream": True}, {"Idempotency-Key": "begins-once"}
    url = f"{service.base_url}/v1/messages"
    first = httpx.post(url, json=body, headers=headers, timeout=20).content
    service.script.cached_tokens = 0
    again = httpx.post(url, json=body, headers=headers, timeout=20).content
    start = first.partition(b"\n\n")[0]
    assert b'"cache_read_input_tokens":16' in start
    assert again.partition(b"\n\n")[0] == start


def test_the_events_of_a_stream_come_in_their_order(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**PARAMS, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_the_async_client_streams_too(service: RunningService) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=service.base_url, api_key="none", max_retries=0
    ) as client:
        whole = await client.messages.create(**PARAMS)
        async with client.messages.stream(**PARAMS) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert len(texts) > 1
    assert blocks_of(final) == blocks_of(whole)


def test_the_beta_client_finds_the_same_route(client: anthropic.Anthropic) -> None:
    betas = ["context-1m-2025-08-07", "nobody-knows-2099-01-01"]
    answer = client.beta.messages.with_raw_response.create(**PARAMS, betas=betas)
    assert "x-penstock-ignored" not in answer.headers
    assert answer.parse().content == client.beta.messages.create(**PARAMS).content


def test_stop_sequences_end_the_text_and_are_named(client: anthropic.Anthropic) -> None:
    params = {**PARAMS, "stop_sequences": ["nothing", " counts"]}
    whole = client.messages.create(**params)
    with client.messages.stream(**params) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " counts")
        (block,) = message.content
        assert block.type == "text"
        assert block.text == ECHOED.partition(" counts")[0]


def test_an_answer_ends_at_the_model_s_end_token_or_at_its_limit(
    client: anthropic.Anthropic,
) -> None:
    assert client.messages.create(**PARAMS).stop_reason == "max_tokens"
    assert client.messages.create(**{**PARAMS, "max_tokens": 200}).stop_reason == "end_turn"


def test_more_tokens_than_the_context_holds_end_with_the_context(
    client: anthropic.Anthropic,
    service: RunningService,
) -> None:
    service.script.tokens_per_step = 64
    long: Any = [{"role": "user", "content": "water " * 120}]
    answer = client.messages.create(model=MODEL, messages=long, max_tokens=10_000)
    context_tokens = service.card.max_model_len
    # The echo of a chat has the template's end token, if it comes that far.
    assert answer.stop_reason in ("end_turn", "model_context_window_exceeded")
    assert answer.usage.input_tokens + answer.usage.output_tokens <= context_tokens


def test_a_conversation_goes_back_as_the_sdk_gave_it(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**PARAMS)
    with client.messages.stream(**PARAMS) as stream:
        streamed = stream.get_final_message()
    for answer in (first, streamed):
        messages = [*QUESTION, answer.to_param(), {"role": "user", "content": "And then?"}]
        again = client.messages.create(
            model=MODEL,
            max_tokens=4,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=messages,
            metadata={"user_id": "u"},
            service_tier="auto",
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 40},
        )
        assert again.usage.input_tokens > first.usage.input_tokens


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
    used = client.messages.create(**PARAMS, system="Be brief.").usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_a_stream_is_kept_alive_by_comments_and_behind_its_first_event_by_pings(
    client: anthropic.Anthropic, service: RunningService
) -> None:
    service.script.pulls = False
    wait_until(lambda: service.worker.is_parked, "the worker's attention")
    body = {**PARAMS, "stream": True}
    service.script.step_s = 0.25
    with httpx.stream("POST", f"{service.base_url}/v1/messages", json=body, timeout=20) as answer:
        received = b""
        for piece in answer.iter_raw():
            received += piece
            if received.count(b": ka\n\n") >= 2:
                service.script.pulls = True
            if b"message_stop" in received:
                break
    waiting, _, running = received.partition(b"event: message_start\n")
    assert set(waiting.split(b"\n\n")) == {b": ka", b""}
    assert b": ka" not in running
    assert b'event: ping\ndata: {"type":"ping"}\n\n' in running
    # The SDK skips pings.
    with client.messages.stream(**{**PARAMS, "max_tokens": 3}) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_the_same_request_under_the_same_key_is_the_same_message(
    client: anthropic.Anthropic,
) -> None:
    headers = {"Idempotency-Key": "messages-once"}
    first = client.messages.create(**PARAMS, extra_headers=headers)
    again = client.messages.create(**PARAMS, extra_headers=headers)
    assert again.id == first.id == again._request_id
    assert blocks_of(again) == blocks_of(first)
    with client.messages.stream(**PARAMS, extra_headers={"Idempotency-Key": "once-more"}) as stream:
        assert stream.get_final_message().id == stream.response.headers["request-id"]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**PARAMS, system="other", extra_headers=headers)
    assert caught.value.error_code == "idempotency_key_reuse"


def test_leaving_a_stream_cancels_the_job(
    client: anthropic.Anthropic, service: RunningService
) -> None:
    service.script.step_s = 0.05
    with client.messages.stream(**{**PARAMS, "max_tokens": 400}) as stream:
        assert next(iter(stream.text_stream))
        name = stream.current_message_snapshot.id
    job = f"{service.base_url}/v1/jobs/{name}"
    wait_until(lambda: httpx.get(job).json()["status"] == "cancelled", "the cancel")
    view = httpx.get(job).json()
    assert (view["id"], view["kind"]) == (name, "message")


# --- errors ---


def test_refusals_become_the_sdk_s_own_exceptions(client: anthropic.Anthropic) -> None:
    endless: Any = {"type": "endless"}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**PARAMS, thinking=endless)
    error = refused.value
    assert error.type == "invalid_request_error"
    assert "'thinking.type'" in (error.api_message or "")
    assert isinstance(error.body, dict)
    assert error.error_code == "unsupported_parameter"
    assert error.body["error"]["details"]["param"] == "thinking.type"
    assert error.request_id is not None
    assert error.request_id.startswith("msg_")
    assert error.body["request_id"] == error.request_id
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**PARAMS, "model": "nobody"})
    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "model_not_found")
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(
            **{**PARAMS, "messages": [{"role": "user", "content": "abc " * 3000}]}
        )
    assert long.value.error_code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**PARAMS, extra_body={"temperature": 1.5})
    with pytest.raises(anthropic.BadRequestError, match="tool_use_id"):
        client.messages.count_tokens(
            model=MODEL,
            messages=[
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "never"}]}
            ],
        )


def test_a_stream_is_refused_before_it_begins(client: anthropic.Anthropic) -> None:
    with (
        pytest.raises(anthropic.BadRequestError),
        client.messages.stream(**{**PARAMS, "max_tokens": 0}),
    ):
        pass


def test_a_job_that_fails_is_an_api_error_whole_and_streamed(
    client: anthropic.Anthropic,
    service: RunningService,
) -> None:
    service.script.stop_after = 3
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.ENGINE_ERROR, Usage(5, 3), message="the step failed"
    )
    with pytest.raises(anthropic.InternalServerError) as whole:
        client.messages.create(**PARAMS)
    assert (whole.value.type, whole.value.api_message) == ("api_error", "the step failed")
    assert whole.value.error_code == "engine_error"
    seen: list[str] = []
    events = client.messages.create(**PARAMS, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        seen.extend(event.type for event in events)
    assert seen[0] == "message_start"
    assert "message_stop" not in seen


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/messages/batches", 404), ("/v1/messages/", 405), ("/v1/messages", 405)],
)
def test_routes_that_are_not_there_say_so_in_the_dialect(
    service: RunningService,
    path: str,
    status: int,
) -> None:
    answer = httpx.get(service.base_url + path)
    body = answer.json()
    assert (answer.status_code, body["type"]) == (status, "error")
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": NaN}', b"\xff"])
def test_what_is_no_json_object_is_refused_in_the_dialect(
    service: RunningService, body: bytes
) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        headers = {"content-type": "application/json"}
        answer = httpx.post(service.base_url + path, content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.promise(
    "Clients: its errors have Anthropic's shape, also those of the HTTP layer (except for bytes "
    "that are not HTTP)"
)
def test_full_queues_outages_and_large_bodies_have_their_own_errors(
    redis_url: str,
    checkpoint: Any,
) -> None:
    limits = {"max_queued_jobs": 1, "max_queue_share_per_tenant": 1, "max_body_bytes": 4096}
    with (
        running_service(redis_url, new_namespace(), checkpoint, **limits) as small,
        anthropic.Anthropic(base_url=small.base_url, api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.ContentTooLargeError) as large:
            client.messages.create(**PARAMS, system="x" * 8000)
        assert large.value.type == "request_too_large"
        small.script.pulls = False
        wait_until(lambda: small.worker.is_parked, "the worker to stop pulling")
        body = {**PARAMS, "stream": True}
        with httpx.stream("POST", f"{small.base_url}/v1/messages", json=body):
            with pytest.raises(anthropic.OverloadedError) as full:
                client.messages.create(**PARAMS)
            assert full.value.status_code == 529
            assert full.value.type == "overloaded_error"
            assert int(full.value.response.headers["retry-after"]) >= 1
    with (
        running_frontend(redis_url, new_namespace()) as alone,
        anthropic.Anthropic(base_url=alone.base_url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.OverloadedError),
    ):
        client.messages.create(**PARAMS)
    limits = {"max_queued_jobs_per_tenant": 1}
    with (
        running_service(redis_url, new_namespace(), checkpoint, **limits) as small,
        anthropic.Anthropic(base_url=small.base_url, api_key="none", max_retries=0) as client,
    ):
        small.script.pulls = False
        wait_until(lambda: small.worker.is_parked, "the worker to stop pulling")
        with (
            httpx.stream("POST", f"{small.base_url}/v1/messages", json=body),
            pytest.raises(anthropic.RateLimitError) as limited,
        ):
            client.messages.create(**PARAMS)
        assert limited.value.type == "rate_limit_error"


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("method", "headers", "body", "status", "kind"),
    [
        ("POST", JSON, b"{", 400, "invalid_request_error"),
        ("POST", JSON, b'{"model": "nobody", "max_tokens": 1}', 400, "invalid_request_error"),
        (
            "POST",
            JSON,
            b'{"model": "nobody", "messages": [{"role": "user", "content": "a"}]}',
            404,
            "not_found_error",
        ),
        ("PUT", JSON, b"{}", 405, "invalid_request_error"),
        ("POST", {"content-type": "text/csv"}, b"{}", 415, "invalid_request_error"),
        ("POST", {**JSON, "content-encoding": "br"}, b"{}", 415, "invalid_request_error"),
        ("POST", JSON, b'{"model": "' + b"x" * 5_000_000 + b'"}', 413, "request_too_large"),
        ("POST", {**JSON, "origin": "https://x.test"}, b"{}", 403, "permission_error"),
    ],
)
def test_every_refusal_has_anthropics_shape(
    service: RunningService,
    path: str,
    method: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
    kind: str,
) -> None:
    if status == 404 and path == "/v1/messages":
        body = body[:-1] + b', "max_tokens": 1}'
    answer = httpx.request(method, service.base_url + path, headers=headers, content=body)
    payload = answer.json()
    assert answer.status_code == status, payload
    assert set(payload) == {"type", "error", "request_id"}
    assert (payload["type"], payload["error"]["type"]) == ("error", kind)
    assert set(payload["error"]) <= {"type", "message", "details"}
    assert payload["request_id"] == answer.headers["request-id"]


def test_the_sdk_tries_again_what_may_succeed_and_nothing_else(
    redis_url: str, service: RunningService
) -> None:
    statuses: list[int] = []

    def client_of(base_url: str) -> anthropic.Anthropic:
        hooks: Any = {"response": [lambda response: statuses.append(response.status_code)]}
        http_client = anthropic.DefaultHttpxClient(event_hooks=hooks)
        return anthropic.Anthropic(
            base_url=base_url, api_key="none", max_retries=1, http_client=http_client
        )

    with (
        running_frontend(redis_url, new_namespace()) as alone,
        client_of(alone.base_url) as client,
        pytest.raises(anthropic.OverloadedError),
    ):
        client.messages.create(**PARAMS)
    assert statuses == [529, 529]
    statuses.clear()
    with client_of(service.base_url) as client:
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**{**PARAMS, "max_tokens": 0})
        service.script.pulls = False
        wait_until(lambda: service.worker.is_parked, "the worker to stop pulling")
        with pytest.raises(anthropic.GatewayTimeoutError) as late:
            client.messages.create(**PARAMS, extra_body={"queue_timeout": 0.1})
    assert late.value.type == "timeout_error"
    assert statuses == [400, 504]


def test_an_internal_error_is_an_api_error(
    client: anthropic.Anthropic,
    service: RunningService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.app.state.services.catalog, "require", broken)
    with pytest.raises(anthropic.InternalServerError) as caught:
        client.messages.create(**PARAMS)
    assert caught.value.type == "api_error"
    assert "secret" not in json.dumps(caught.value.body)


# --- models ---


def test_models_are_listed_in_the_dialect_of_the_request(
    client: anthropic.Anthropic, service: RunningService
) -> None:
    (model,) = client.models.list(limit=5)
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert model.max_tokens == service.card.max_model_len
    assert client.models.retrieve(MODEL).created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("nobody/nothing")
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.models.list(limit=0)
    plain = httpx.get(f"{service.base_url}/v1/models").json()
    assert (plain["object"], plain["data"][0]["object"]) == ("list", "model")


def test_a_browser_may_send_the_dialect_s_headers(service: RunningService) -> None:
    params = "anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access,x-api-key"
    answer = httpx.options(
        f"{service.base_url}/v1/messages",
        headers={
            "origin": "http://localhost:3000",
            "access-control-request-method": "POST",
            "access-control-request-headers": params,
        },
    )
    listed = answer.headers["access-control-allow-headers"].split(",")
    allowed = {name.strip() for name in listed}
    assert set(params.split(",")) <= allowed
    url, origin = f"{service.base_url}/v1/messages", "http://localhost:3000"
    refused = httpx.post(url, content=b"", headers={"origin": origin})
    assert refused.headers["access-control-allow-origin"] == origin
    for headers, status in (({"origin": "https://evil.example"}, 403), ({"host": "evil"}, 421)):
        stranger = httpx.post(url, json={}, headers=headers)
        assert stranger.status_code == status
        assert stranger.json()["type"] == "error"
        assert stranger.json()["request_id"] == stranger.headers["request-id"]
    assert "request-id" in refused.headers["access-control-expose-headers"].split(", ")

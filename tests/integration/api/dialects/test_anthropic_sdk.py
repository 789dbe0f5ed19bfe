"""The Anthropic Python SDK against the real app: what its users do, unchanged."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.dialects import DIALECTS
from tests.support.lazy_import import lazy_import
from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    MODEL,
    RunningService,
    running_frontend,
)
from tests.support.service_fixtures import anthropic_client

anthropic = lazy_import("anthropic")

QUESTION: Any = [{"role": "user", "content": "The keeper counts to sixty, héllo 😀."}]
PARAMS: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}


client = anthropic_client


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


def test_a_job_that_fails_is_raised_out_of_its_stream(
    client: anthropic.Anthropic,
    service: RunningService,
) -> None:
    service.script.stop_after = 3
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.ENGINE_ERROR, Usage(5, 3), message="the step failed"
    )
    seen: list[str] = []
    events = client.messages.create(**PARAMS, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the step failed"):
        seen.extend(event.type for event in events)
    assert seen[0] == "message_start"
    assert "message_stop" not in seen


def test_a_route_that_is_not_there_is_an_error_of_the_dialect(service: RunningService) -> None:
    answer = httpx.get(f"{service.base_url}/v1/messages/batches")
    assert DIALECTS["messages"].error(answer, 404).code == "not_found"
    assert answer.headers["content-length"] == str(len(answer.content))


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
        service.park()
        with pytest.raises(anthropic.GatewayTimeoutError) as late:
            client.messages.create(**PARAMS, extra_body={"queue_timeout": 0.1})
    assert late.value.type == "timeout_error"
    assert statuses == [400, 504]


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
    assert "request-id" in refused.headers["access-control-expose-headers"].split(", ")

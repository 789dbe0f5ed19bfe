"""Responses over WebSocket, with real clients: turns, refusals, cuts and resumes."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.integration.api.dialects.test_responses import raw_events
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_frontend

KEYS = f"sha256:{hashlib.sha256(b'sk-alice').hexdigest()} tenant=alice"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
TURN = {
    "type": "response.create",
    "model": MODEL,
    "input": "The keeper counts to sixty, héllo 😀.",
    "max_output_tokens": 40,
    "ignore_eos": True,
}


def opened(url: str, **options: Any) -> ClientConnection:
    return connect(f"{url.replace('http', 'ws', 1)}/v1/responses", **options)


def events_of(client: ClientConnection, message: Any) -> list[dict[str, Any]]:
    client.send(message if isinstance(message, str) else json.dumps(message))
    events = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(client.recv(timeout=60)))
    return events


def test_a_turn_has_the_events_of_http_and_the_next_one_goes_on_from_it(
    service: RunningService,
) -> None:
    with opened(service.base_url) as client:
        events = events_of(client, TURN)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response = events[-1]["response"]
        assert events == raw_events(service.base_url, response["id"])
        after = events_of(
            client, {**TURN, "previous_response_id": response["id"], "max_output_tokens": 3}
        )
        assert after[-1]["response"]["previous_response_id"] == response["id"]
        assert after[-1]["response"]["usage"]["input_tokens"] > response["usage"]["input_tokens"]


def test_what_is_not_stored_is_known_to_its_socket_alone(service: RunningService) -> None:
    turn = {**TURN, "store": False, "max_output_tokens": 3}
    with opened(service.base_url) as client:
        first = events_of(client, {**turn, "generate": False})
        assert [event["type"] for event in first] == ["response.created", "response.completed"]
        prompt = first[-1]["response"]["usage"]["input_tokens"]
        created, warm = (event["response"] for event in first)
        assert (created["status"], warm["status"]) == ("in_progress", "completed")
        assert warm["output"] == []
        previous = {"previous_response_id": first[-1]["response"]["id"]}
        second = events_of(client, {**turn, **previous, "input": []})
        assert second[-1]["response"]["usage"]["input_tokens"] == prompt
        own = ("id", "status", "output", "usage", "created_at", "completed_at")
        own += ("incomplete_details", "previous_response_id")
        whole = second[-1]["response"]
        assert created.keys() == warm.keys() == whole.keys()
        assert all(warm[name] == whole[name] for name in whole if name not in own)
        previous = {"previous_response_id": second[-1]["response"]["id"]}
        third = events_of(client, {**turn, **previous, "input": "And?"})
        assert third[-1]["response"]["usage"]["input_tokens"] > prompt
        stored = events_of(client, {**TURN, "max_output_tokens": 3})[-1]["response"]
        previous = {"previous_response_id": stored["id"]}
        warm = events_of(client, {**turn, **previous, "generate": False})[-1]["response"]
        previous = {"previous_response_id": warm["id"]}
        on_both = events_of(client, {**turn, **previous, "input": []})[-1]["response"]
        assert on_both["usage"]["input_tokens"] == warm["usage"]["input_tokens"]
        assert warm["usage"]["input_tokens"] > stored["usage"]["input_tokens"]
    with opened(service.base_url) as client:
        (refused,) = events_of(client, {**turn, **previous, "input": "And?"})
        assert refused["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("num_read", [1, 2, 9])
def test_a_socket_that_is_cut_resumes_at_another_frontend(
    service: RunningService, other_url: str, num_read: int
) -> None:
    with opened(service.base_url) as client:
        client.send(json.dumps(TURN))
        read = [json.loads(client.recv(timeout=60)) for _ in range(num_read)]
        client.socket.shutdown(socket.SHUT_RDWR)  # no closing handshake
    response_id, number = read[0]["response"]["id"], read[-1]["sequence_number"]
    resume = {"type": "response.resume", "response_id": response_id, "starting_after": number}
    with opened(other_url) as again:
        rest = events_of(again, resume)
    assert rest[-1]["type"] in ("response.completed", "response.incomplete")
    assert rest[-1]["response"]["usage"]["output_tokens"] == 40
    assert [*read, *rest] == raw_events(service.base_url, response_id)
    with opened(service.base_url) as again:
        whole = events_of(again, {"type": "response.resume", "response_id": response_id})
    assert whole == [*read, *rest]


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ("{", 400, None),
        ("[]", 400, None),
        ({"type": "cat"}, 400, "type"),
        ({**TURN, "model": "cat"}, 404, "model"),
        ({**TURN, "temperature": 9}, 400, "temperature"),
        ({**TURN, "stream_id": "a"}, 400, "stream_id"),
        ({**TURN, "generate": False, "temperature": "x"}, 400, "temperature"),
        ({"type": "response.resume", "response_id": "resp_cat"}, 404, "response_id"),
        ({"type": "response.resume", "response_id": "../models"}, 400, "response_id"),
        (
            {"type": "response.resume", "response_id": "r", "starting_after": "1"},
            400,
            "starting_after",
        ),
    ],
)
def test_a_bad_message_is_an_error_and_the_socket_stays(
    service: RunningService, message: Any, status: int, param: str | None
) -> None:
    with opened(service.base_url) as client:
        (event,) = events_of(client, message)
        assert (event["type"], event["status"], event["error"]["param"]) == ("error", status, param)
        assert events_of(client, {**TURN, "max_output_tokens": 1})[-1]["type"] != "error"


def closing_code(client: ClientConnection, messages: list[str]) -> int | None:
    """The code with which the server closes; None where it was lost with the connection."""
    with pytest.raises(ConnectionClosed) as closed:
        for _ in use(client, messages):
            pass
    return None if closed.value.rcvd is None else closed.value.rcvd.code


def use(client: ClientConnection, messages: list[str]) -> Iterator[Any]:
    for message in messages:
        client.send(message)
    while True:
        yield client.recv(timeout=60)


def test_too_many_and_too_large_messages_close_the_socket(service: RunningService) -> None:
    with opened(service.base_url) as client:
        assert closing_code(client, [json.dumps(TURN)] * 40) == 1008
    with opened(service.base_url) as client:
        too_long = "x" * (service.settings.max_body_bytes + 1)
        assert closing_code(client, [too_long]) in (1009, None)


def test_pages_of_other_sites_and_other_paths_are_refused(service: RunningService) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(service.base_url, origin="https://evil.example")
    assert refused.value.response.status_code == 403
    assert b"origin_not_allowed" in refused.value.response.body
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{service.base_url.replace('http', 'ws', 1)}/v1/models/x")
    assert refused.value.response.status_code == 404
    with opened(service.base_url, origin=service.base_url) as client:  # type: ignore[arg-type]
        assert events_of(client, {**TURN, "max_output_tokens": 1})


def test_a_key_is_required_where_http_requires_one(redis_url: str) -> None:
    with running_frontend(redis_url, new_namespace(), api_keys=KEYS) as made:
        with pytest.raises(InvalidStatus) as refused:
            opened(made.base_url)
        assert refused.value.response.status_code == 401
        headers = {"Authorization": "Bearer sk-alice"}
        with opened(made.base_url, additional_headers=headers) as client:
            (event,) = events_of(client, TURN)
            assert event["status"] in (404, 503)  # there is no worker


async def test_the_sdks_connection_reads_the_turns(service: RunningService) -> None:
    kinds: list[str] = []
    async with (
        AsyncOpenAI(base_url=f"{service.base_url}/v1", api_key="none") as client,
        client.responses.connect() as connection,
    ):
        await connection.response.create(model=MODEL, input="Hi.", max_output_tokens=3)
        while not kinds or kinds[-1] not in ENDS:
            kinds.append((await connection.recv()).type)
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_offers_of_other_protocols_are_still_ignored(service: RunningService) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    answer = httpx.get(f"{service.base_url}/v1/models", headers=headers)
    assert answer.status_code == 200

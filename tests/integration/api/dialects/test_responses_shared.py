"""Conversations whose responses share their requests: each is read as if it had one of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai import OpenAI

from api.dialects.responses.items import input_items
from tests.integration.api.dialects.test_responses import create, other, reference  # noqa: F401
from tests.support.running_service import RunningService
from tests.support.service_fixtures import openai_client

client = openai_client

TURNS = 3
LABELS = {str(number): "m" * 500 for number in range(6)}  # no part of a prompt


def begun() -> list[Any]:
    return [{"role": "user", "content": f"{number} é"} for number in range(8)]


def converse(client: OpenAI, style: str) -> tuple[list[Any], list[list[Any]]]:
    """Returns the responses of some turns, and the items that the request of each had."""
    responses: list[Any] = []
    sent: list[list[Any]] = []
    items = begun()
    for turn in range(TURNS):
        more: dict[str, Any] = {}
        if style == "previous" and responses:
            items, more = [], {"previous_response_id": responses[-1].id}
        items = [*items, {"role": "user", "content": f"turn {turn}"}]
        made = create(client, input=items, metadata=LABELS, max_output_tokens=4, **more)
        responses.append(made)
        sent.append(items)
        items = [*items, {"role": "assistant", "content": made.output_text}]
    return responses, sent


def stored_parts(service: RunningService) -> dict[str, bytes]:
    redis, keys = service.transport.connections.commands, service.transport.keys
    names: Any = service.call(redis.keys(keys.part("*")))
    return {name.decode(): service.call(redis.get(name)) for name in names}


@pytest.mark.parametrize("style", ["whole", "previous"])
def test_every_turn_is_read_on_any_frontend_as_it_was_made(
    client: OpenAI,
    other: OpenAI,  # noqa: F811
    service: RunningService,
    style: str,
) -> None:
    service.worker.seen.clear()
    responses, sent = converse(client, style)
    prompts = [delivery.job.prompt_token_ids for delivery in service.worker.seen]
    for made, items in zip(responses, sent, strict=True):
        job_id = made.id.removeprefix("resp_")
        listed = list(other.responses.input_items.list(made.id, order="asc"))
        shown = [item.to_dict() for item in listed]
        assert shown == input_items([{"type": "message", **item} for item in items], job_id)
        assert other.responses.retrieve(made.id).to_dict() == made.to_dict()
    for earlier, later in pairwise(prompts):
        assert len(later) > len(earlier)
        assert later[: len(earlier) // 2] == earlier[: len(earlier) // 2]
    labels = [text for text in stored_parts(service).values() if b"m" * 500 in text]
    assert len(labels) == 1, "the turns share them"


def test_an_item_of_a_shared_request_can_be_referred_to(
    client: OpenAI,
    other: OpenAI,  # noqa: F811
) -> None:
    responses, _ = converse(client, "whole")
    item_id = client.responses.input_items.list(responses[-1].id, order="asc").data[7].id
    made = create(other, input=reference(item_id))
    (item,) = client.responses.input_items.list(made.id).data
    assert item.to_dict()["content"][0]["text"] == begun()[7]["content"]


@pytest.mark.parametrize("lost", ["labels", "item"])
def test_a_response_that_lacks_a_part_is_no_longer_kept(
    client: OpenAI, service: RunningService, lost: str
) -> None:
    responses, _ = converse(client, "previous")
    mark = b"m" * 500 if lost == "labels" else b'"3 \xc3\xa9"'
    redis = service.transport.connections.commands
    (name,) = [name for name, text in stored_parts(service).items() if mark in text]
    service.call(redis.delete(name))

    def code_of(call: Callable[[], object]) -> tuple[int, str | None]:
        with pytest.raises(openai.APIStatusError) as refused:
            call()
        return refused.value.status_code, refused.value.code

    first, last = responses[0].id, responses[-1].id
    assert code_of(lambda: client.responses.retrieve(first)) == (404, "response_not_found")
    assert code_of(lambda: client.responses.input_items.list(first)) == (404, "response_not_found")
    missing = (400, "previous_response_not_found")
    assert code_of(lambda: create(client, previous_response_id=last)) == missing


def test_a_deleted_conversation_leaves_no_part(client: OpenAI, service: RunningService) -> None:
    before = stored_parts(service).keys()
    responses, _ = converse(client, "whole")
    assert len(stored_parts(service)) > len(before)
    client.responses.delete(responses[-1].id)
    assert client.responses.retrieve(responses[-2].id).id == responses[-2].id
    assert list(client.responses.input_items.list(responses[-2].id))
    for made in responses[:-1]:
        client.responses.delete(made.id)
    assert stored_parts(service).keys() == before

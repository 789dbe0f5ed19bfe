"""OpenAI's Responses API over the real app: the SDK's calls, two frontends, one store."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response

from api.dialects.responses import request as responses
from api.dialects.responses import store as earlier
from api.dialects.responses.items import input_items
from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.running_service import MODEL, RunningService, wait_until
from tests.support.service_fixtures import openai_client
from tests.support.sse_readers import payloads

INPUT = "The keeper counts to sixty, héllo 😀."
GO_ON = {"ignore_eos": True}  # the worker's echo of a chat has the template's end tokens
ENDED = ("completed", "incomplete", "failed", "cancelled")

client = openai_client


@pytest.fixture
def other(other_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{other_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def create(client: OpenAI, **members: Any) -> Any:
    params = {"model": MODEL, "input": INPUT, "max_output_tokens": 40, "extra_body": GO_ON}
    return client.responses.create(**(params | members))


def until_ended(client: OpenAI, response_id: str) -> Response:
    def ended() -> bool:
        return client.responses.retrieve(response_id).status in ENDED

    wait_until(ended, "the end of the response", 60)
    return client.responses.retrieve(response_id)


def raw_events(url: str, response_id: str, starting_after: int | None = None) -> list[Any]:
    """What a frontend tells of a stored response, undecoded but for JSON."""
    query: dict[str, Any] = {"stream": "true"}
    if starting_after is not None:
        query["starting_after"] = starting_after
    answer = httpx.get(f"{url}/v1/responses/{response_id}", params=query, timeout=60)
    assert answer.status_code == 200
    lines, events = answer.text.splitlines(), payloads(answer.content)
    assert [line.removeprefix("event: ") for line in lines if line[:6] == "event:"] == [
        event["type"] for event in events
    ]
    return events


@pytest.mark.promise(
    "Responses: the SDK creates, streams, parses its events and gets the response, sync and async"
)
def test_a_whole_answer_is_the_streamed_one_and_the_stored_one(
    client: OpenAI,
    other: OpenAI,
    service: RunningService,
    other_url: str,
) -> None:
    whole = create(client, instructions="Echo.", metadata={"a": "b"}, temperature=0.5)
    assert whole.id.startswith("resp_")
    assert whole._request_id == whole.id
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 40
    assert (whole.instructions, whole.metadata, whole.temperature) == ("Echo.", {"a": "b"}, 0.5)
    assert whole.output_text
    assert other.responses.retrieve(whole.id).to_dict() == whole.to_dict()

    streamed = list(
        create(client, instructions="Echo.", metadata={"a": "b"}, temperature=0.5, stream=True)
    )
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    assert [event.type for event in streamed[:2]] == ["response.created", "response.in_progress"]
    last = streamed[-1].response
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage
    deltas = [event.delta for event in streamed if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 3
    for url in (service.base_url, other_url):
        assert raw_events(url, last.id) == [event.to_dict() for event in streamed]


def test_every_reader_is_sent_the_same_time_of_completion(
    client: OpenAI, service: RunningService, other_url: str
) -> None:
    streamed = list(create(client, stream=True, extra_body={}))
    first, last = streamed[0].response, streamed[-1].response
    assert (first.completed_at, last.status) == (None, "completed")
    job = httpx.get(f"{service.base_url}/v1/jobs/{last.id}").json()
    assert last.completed_at == int(job["ended_at"])
    for url in (service.base_url, other_url):
        assert raw_events(url, last.id) == [event.to_dict() for event in streamed]
        stored = httpx.get(f"{url}/v1/responses/{last.id}").json()
        assert stored == last.to_dict()
    whole = create(client, extra_body={})
    assert whole.completed_at == client.responses.retrieve(whole.id).completed_at is not None


def test_penalties_take_effect_and_are_sent_back(client: OpenAI, service: RunningService) -> None:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -1}
    response = create(client, extra_body=GO_ON | penalties).to_dict()
    assert {name: response[name] for name in penalties} == penalties
    assert client.responses.retrieve(response["id"]).to_dict() == response
    sampling = service.worker.seen[-1].job.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    default = create(client).to_dict()
    assert (default["presence_penalty"], default["frequency_penalty"]) == (0, 0)


def test_the_stream_helper_builds_the_response(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="abc") as received:
        kinds = {event.type for event in received}
        final = received.get_final_response()
    assert {"response.output_text.delta", "response.output_text.done"} <= kinds
    assert final.status == "completed"
    assert final.output_text == "user\nabc"


@pytest.mark.promise(
    "Responses: background responses need no reader; others are cancelled when their reader "
    "disconnects"
)
def test_a_response_in_the_background_is_made_without_a_reader_and_read_anywhere(
    client: OpenAI,
    other: OpenAI,
    other_url: str,
    service: RunningService,
) -> None:
    service.script.starts = False
    begun = create(client, background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    wait_until(
        lambda: other.responses.retrieve(begun.id).status == "in_progress", "the claim of it"
    )
    service.script.starts = True
    ended = until_ended(other, begun.id)
    assert ended.status == "incomplete"
    assert ended.output_text
    events = raw_events(other_url, begun.id)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1]["response"] == ended.to_dict()


@pytest.mark.promise("Responses: a stream resumes after any event, at any frontend")
def test_a_stream_that_breaks_off_goes_on_at_another_frontend(
    client: OpenAI,
    other: OpenAI,
    other_url: str,
    service: RunningService,
) -> None:
    service.script.stop_after = 9
    head: list[dict[str, Any]] = []
    with create(client, background=True, stream=True) as received:
        for event in received:
            head.append(event.to_dict())
            if len(head) == 8:
                break
    response_id = head[0]["response"]["id"]
    number = head[-1]["sequence_number"]
    assert other.responses.retrieve(response_id).status == "in_progress"
    tail = other.responses.retrieve(response_id, stream=True, starting_after=number)
    first = next(tail).to_dict()
    assert first["sequence_number"] == number + 1
    service.script.stop_after = None
    rest = [first, *(event.to_dict() for event in tail)]
    assert rest[-1]["type"] == "response.incomplete"
    assert head + rest == raw_events(other_url, response_id)
    assert raw_events(other_url, response_id, number) == rest
    assert raw_events(other_url, response_id, rest[-1]["sequence_number"]) == []


@pytest.mark.parametrize("is_tail", [False, True])
def test_a_stream_that_its_frontend_ends_names_where_to_resume(
    client: OpenAI,
    other_url: str,
    service: RunningService,
    is_tail: bool,
) -> None:
    service.script.stop_after = 5
    received = create(client, background=True, stream=True)
    first = next(received)
    if is_tail:
        received.close()
        received = client.responses.retrieve(first.response.id, stream=True, starting_after=0)
    events = [first.to_dict(), *(next(received).to_dict() for _ in range(5))]
    service.loop.call_soon_threadsafe(service.app.state.open_requests.cut_all)
    *heard, error = [*events, *(event.to_dict() for event in received)]
    assert (error["type"], error["code"]) == ("error", "frontend_draining")
    assert error["sequence_number"] == heard[-1]["sequence_number"]
    where = f"?stream=true&starting_after={error['sequence_number']} continues from here."
    assert f"GET /v1/responses/{first.response.id}{where}" in error["message"]
    service.script.stop_after = None
    rest = raw_events(other_url, first.response.id, error["sequence_number"])
    assert heard + rest == raw_events(other_url, first.response.id)


def test_a_tail_that_ends_early_claims_nothing_back(
    client: OpenAI,
    service: RunningService,
) -> None:
    """Its reader has more than the tail has counted by then."""
    service.script.pulls = False
    begun = create(client, background=True)
    received = client.responses.retrieve(begun.id, stream=True, starting_after=20)
    wait_until(lambda: len(service.app.state.open_requests) == 1, "the tail")
    service.loop.call_soon_threadsafe(service.app.state.open_requests.cut_all)
    (error,) = [event.to_dict() for event in received]
    assert (error["type"], error["sequence_number"]) == ("error", 20)
    assert "starting_after=20 continues" in error["message"]
    client.responses.cancel(begun.id)


def test_the_stream_helper_takes_up_a_response_by_its_id(
    client: OpenAI,
    other: OpenAI,
) -> None:
    begun = client.responses.create(model=MODEL, input="abc", background=True)
    with other.responses.stream(response_id=begun.id, starting_after=3) as received:
        numbers = [event.sequence_number for event in received]
        assert numbers[0] == 4
        assert received.get_final_response().output_text == "user\nabc"


def test_a_plain_stream_that_is_left_is_cancelled_and_one_in_the_background_is_not(
    client: OpenAI,
    service: RunningService,
) -> None:
    service.script.stop_after = 3
    ids = []
    for background in (False, True):
        with create(client, stream=True, background=background) as received:
            ids.append(next(received).response.id)
    left = until_ended(client, ids[0])
    assert left.status == "cancelled"
    assert left.error is None
    assert client.responses.retrieve(ids[1]).status in ("queued", "in_progress")
    service.script.stop_after = None
    assert until_ended(client, ids[1]).status == "incomplete"


@pytest.mark.promise("Responses: cancel by id, idempotent")
def test_cancel_ends_what_runs_in_the_background_and_may_be_repeated(
    client: OpenAI,
    other: OpenAI,
    other_url: str,
    service: RunningService,
) -> None:
    service.script.stop_after = 3
    begun = create(client, background=True)
    job = f"{service.base_url}/v1/jobs/{begun.id}"
    wait_until(
        lambda: httpx.get(job).json()["usage"]["completion_tokens"] == 3, "all that it will say"
    )
    for _ in range(2):
        cancelled = other.responses.cancel(begun.id)
        assert cancelled.status == "cancelled"
        assert cancelled.output[0].status == "incomplete"
        assert cancelled.usage.output_tokens == 3
    last = raw_events(other_url, begun.id)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert last["response"]["error"]["type"] == "cancelled"

    service.script.stop_after = None
    plain = create(client)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(plain.id)
    done = create(client, background=True)
    assert until_ended(client, done.id).status == "incomplete"
    assert client.responses.cancel(done.id).status == "incomplete"


def test_deleted_is_gone_everywhere_running_or_not(
    client: OpenAI,
    other: OpenAI,
    service: RunningService,
) -> None:
    ended = create(client)
    service.script.stop_after = 3
    running = create(client, background=True)
    for response_id in (ended.id, running.id):
        answer = httpx.delete(f"{service.base_url}/v1/responses/{response_id}")
        assert answer.json() == {"id": response_id, "object": "response", "deleted": True}
        for call in (
            other.responses.retrieve,
            other.responses.cancel,
            other.responses.delete,
            other.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError) as gone:
                call(response_id)
            assert gone.value.code == "response_not_found"
    wait_until(lambda: not service.worker.jobs, "the worker to drop it")


def test_what_is_not_stored_cannot_be_fetched(client: OpenAI) -> None:
    answer = create(client, store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"


@pytest.mark.promise(
    "Responses: the job is the response: kept for its retention, deleted on request, not stored "
    "without `store`"
)
def test_a_stored_response_is_kept_for_its_time_and_others_as_before(
    client: OpenAI,
    service: RunningService,
) -> None:
    stored, plain = create(client), create(client, store=False)
    redis = service.transport.connections.commands
    keys = service.transport.keys

    def kept_ms(response_id: str) -> int:
        return int(service.call(redis.pttl(keys.log(response_id.removeprefix("resp_")))))

    assert service.settings.response_ttl_s == 3600
    assert 3_000_000 < kept_ms(stored.id) <= 3_600_000
    wait_until(lambda: kept_ms(plain.id) <= 60_000, "the reader's leaving")


@pytest.mark.promise("Responses: conversations by `previous_response_id`, including tool calls")
def test_a_conversation_goes_on_from_the_response_before(
    client: OpenAI,
    other: OpenAI,
    service: RunningService,
) -> None:
    first = client.responses.create(
        model=MODEL, input="abc", instructions="Echo.", max_output_tokens=300
    )
    second = other.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "de"}]}],
        previous_response_id=first.id,
    )
    third = client.responses.create(
        model=MODEL, input="f", instructions="Now!", previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    prompts = [
        service.text.tokenizer.decode(delivery.job.prompt_token_ids, skip_special_tokens=False)
        for delivery in service.worker.seen
    ]

    def output(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    assert first.output_text == "system\nEcho."
    own = output("user", "abc") + output("assistant", first.output_text) + output("user", "de")
    assert prompts[1] == own + "<|im_start|>assistant\n"
    assert prompts[2] == (
        output("system", "Now!")
        + own
        + output("assistant", second.output_text)
        + output("user", "f")
        + "<|im_start|>assistant\n"
    )
    listed = client.responses.input_items.list(third.id)
    assert [item.content[0].text for item in listed.data] == ["f"]


def test_a_conversation_has_a_bound(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[str | None] = [None]
    for _ in range(2):
        ids.append(create(client, max_output_tokens=1, previous_response_id=ids[-1]).id)
    for name in ("MAX_TURNS", "MAX_BYTES", "MAX_READ_BYTES"):
        with monkeypatch.context() as patched:
            patched.setattr(earlier, name, 1)
            with pytest.raises(openai.BadRequestError, match="more than 1") as refused:
                create(client, previous_response_id=ids[-1])
        assert refused.value.param == "previous_response_id"
    create(client, max_output_tokens=1, previous_response_id=ids[-1])


def test_a_conversation_that_is_stored_in_too_many_bytes_is_refused_before_it_is_read(
    client: OpenAI, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels, instructions and unused tools are no items; they are read all the same."""
    first = create(client, max_output_tokens=1, metadata={str(n): "x" * 500 for n in range(16)})
    second = create(client, max_output_tokens=1, previous_response_id=first.id)
    read: list[str] = []
    store = service.app.state.services.store
    request_record = store.request_record

    async def counted(job_id: str) -> str | None:
        read.append(job_id)
        found: str | None = await request_record(job_id)
        return found

    monkeypatch.setattr(store, "request_record", counted)
    monkeypatch.setattr(earlier, "MAX_READ_BYTES", 8_000)
    with pytest.raises(openai.BadRequestError, match="as stored"):
        create(client, previous_response_id=second.id)
    assert [f"resp_{job_id}" for job_id in read] == [second.id]


def reference(item_id: str) -> Any:
    return [{"type": "item_reference", "id": item_id}]


def test_an_item_that_is_not_kept_cannot_be_referred_to(
    client: OpenAI, other: OpenAI, service: RunningService
) -> None:
    stored, plain = create(client), create(client, store=False)
    job_id = stored.id.removeprefix("resp_")
    unknown = (
        *("x", "", "msg_1", f"msg_{job_id}", "msg_0-nobody_0", "rs_0-nobody_in0", "m_0-é_1"),
        *(f"msg_{job_id}_1", f"rs_{job_id}_0", f"msg_{job_id}_00", f"msg_{job_id}_in1"),
        plain.output[0].id,
    )
    for item_id in unknown:
        with pytest.raises(openai.NotFoundError, match=f"Item with id '{item_id}' not") as refused:
            create(other, input=reference(item_id))
        assert (refused.value.code, refused.value.param) == ("item_not_found", "input")
    service.worker.seen.clear()
    create(other, input=[*reference(f"msg_{job_id}_in0"), *reference(stored.output[0].id)])
    client.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        create(other, input=reference(f"msg_{job_id}_in0"))


def test_items_can_be_referred_to_once_their_response_has_ended(
    client: OpenAI, service: RunningService
) -> None:
    service.script.stop_after = 9
    running = create(client, background=True)
    wait_until(lambda: client.responses.retrieve(running.id).output_text, "its text")
    job_id = running.id.removeprefix("resp_")
    for item_id in (f"msg_{job_id}_0", f"msg_{job_id}_in0"):
        with pytest.raises(openai.BadRequestError, match="has not ended") as refused:
            create(client, input=reference(item_id))
        assert refused.value.code == "item_in_progress"
    client.responses.cancel(running.id)
    service.script.stop_after = None
    both = [*reference(f"msg_{job_id}_in0"), *reference(f"msg_{job_id}_0")]
    items = client.responses.input_items.list(create(client, input=both).id, order="asc").data
    assert [(item.role, item.status) for item in items] == [
        ("user", "completed"),
        ("assistant", "incomplete"),
    ]


def test_references_have_a_bound(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of responses that are read, and of bytes: an item counts as often as it is named."""
    ids = [create(client, max_output_tokens=1).output[0].id for _ in range(2)]
    item = create(client, input=reference(ids[0])).id
    kept = httpx.get(f"{client.base_url}responses/{item}/input_items").json()["data"]
    num_bytes = len(json.dumps(kept[0], separators=(",", ":")))

    def param_of(named: list[str]) -> str | None:
        with pytest.raises(openai.BadRequestError, match="more than") as refused:
            create(client, input=[one for name in named for one in reference(name)])
        return refused.value.param

    with monkeypatch.context() as patched:
        patched.setattr(earlier, "MAX_TURNS", 1)
        create(client, input=reference(ids[0]) * 2)
        assert param_of(ids) == "input"
    with monkeypatch.context() as patched:
        patched.setattr(earlier, "MAX_BYTES", num_bytes * 3 // 2)
        create(client, input=reference(ids[0]))
        assert param_of([ids[0]] * 2) == "input"
    with monkeypatch.context() as patched:
        patched.setattr(earlier, "MAX_READ_BYTES", 1)
        assert param_of(ids[:1]) == "input"


@pytest.mark.parametrize("by", ["previous_response_id", "item_reference"])
def test_what_a_conversation_goes_on_from_is_kept_anew(
    client: OpenAI, service: RunningService, by: str
) -> None:
    made = [create(client, max_output_tokens=1)]
    goes_on: dict[str, Any] = {"input": reference(made[0].output[0].id)}
    if by == "previous_response_id":
        made += [create(client, max_output_tokens=1, previous_response_id=made[0].id)]
        goes_on = {"previous_response_id": made[1].id}
    redis, keys = service.transport.connections.commands, service.transport.keys
    kept = [
        name(response.id.removeprefix("resp_"))
        for response in made
        for name in (keys.job, keys.log, keys.request_record)
    ]
    for key in kept:
        service.call(redis.pexpire(key, 60_000))
    create(client, max_output_tokens=1, **goes_on)
    assert all(service.call(redis.pttl(key)) > 60_000 for key in kept)


def test_a_flexible_response_yields_to_others_and_reports_its_tier(
    client: OpenAI,
    service: RunningService,
) -> None:
    assert create(client, service_tier="flex").service_tier == "flex"
    assert create(client, service_tier="auto").service_tier == "default"
    assert [delivery.job.lane > 0 for delivery in service.worker.seen] == [True, False]


def test_earlier_responses_must_have_ended_well(
    client: OpenAI,
    service: RunningService,
) -> None:
    service.script.stop_after = 3
    running = create(client, background=True).id

    def code_of(response_id: str) -> str | None:
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, previous_response_id=response_id)
        assert refused.value.param == "previous_response_id"
        return refused.value.code

    assert code_of(running) == "previous_response_in_progress"
    client.responses.cancel(running)
    assert code_of(running) == "previous_response_failed"
    assert code_of("resp_0-nobody") == code_of("x y") == "previous_response_not_found"


def test_a_job_that_fails_ends_its_stream_and_its_status_with_the_error(
    client: OpenAI,
    other_url: str,
    service: RunningService,
) -> None:
    service.script.stop_after = 3
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.ENGINE_ERROR, Usage(5, 3), message="the step failed"
    )
    streamed = [event.to_dict() for event in create(client, stream=True)]
    last = streamed[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "the step failed"
    assert last["response"]["error"]["type"] == "engine_error"
    stored = client.responses.retrieve(streamed[0]["response"]["id"])
    assert stored.to_dict() == last["response"]
    assert raw_events(other_url, stored.id) == streamed


def test_input_items_are_listed_in_pages(client: OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    answer = create(client, input=items)
    listed = [
        item.content[0].text for item in client.responses.input_items.list(answer.id, limit=2)
    ]
    assert listed == ["4", "3", "2", "1", "0"]
    upwards = client.responses.input_items.list(answer.id, order="asc")
    assert [item.content[0].text for item in upwards.data] == ["0", "1", "2", "3", "4"]


def test_the_job_behind_it_is_found_by_the_same_id(
    client: OpenAI,
    service: RunningService,
) -> None:
    answer = create(client)
    job = httpx.get(f"{service.base_url}/v1/jobs/{answer.id}").json()
    assert (job["id"], job["kind"], job["status"]) == (answer.id, "response", "finished")
    named = httpx.get(f"{service.base_url}/v1/responses/{answer.id}")
    assert named.headers["x-request-id"] == answer.id


def test_only_a_response_is_found_as_one(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.retrieve("resp_0-nobody")
    assert missing.value.code == "response_not_found"
    other_kind = client.completions.create(model=MODEL, prompt="a", max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other_kind.id)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=maybe", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("include=reasoning.encrypted_content", "include.0"),
        ("include_obfuscation=true", "include_obfuscation"),
        ("cat=1", "cat"),
    ],
)
def test_a_bad_query_is_a_400_that_names_it(
    client: OpenAI,
    service: RunningService,
    query: str,
    param: str,
) -> None:
    answer = create(client, max_output_tokens=1)
    refused = httpx.get(f"{service.base_url}/v1/responses/{answer.id}?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_async_client_does_the_same(service: RunningService, other_url: str) -> None:
    async with (
        AsyncOpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0) as client,
        AsyncOpenAI(base_url=f"{other_url}/v1", api_key="none", max_retries=0) as other,
    ):
        whole = await client.responses.create(model=MODEL, input="abc")
        assert whole.output_text == "user\nabc"
        async with client.responses.stream(model=MODEL, input="abc") as received:
            events = [event async for event in received]
            final = await received.get_final_response()
        assert final.output_text == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        begun = await client.responses.create(model=MODEL, input="abc", background=True)
        tail = await other.responses.retrieve(begun.id, stream=True, starting_after=1)
        numbers = [event.sequence_number async for event in tail]
        assert numbers[0] == 2
        many = await asyncio.gather(
            *(client.responses.create(model=MODEL, input=str(number)) for number in range(20))
        )
        assert [answer.output_text for answer in many] == [f"user\n{n}" for n in range(20)]


def test_items_are_read_on_the_threads_of_the_text_pool(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []

    def read(params: Any, job_id: str, referenced: Any) -> Any:
        readers.append(threading.current_thread().name)
        return input_items(params, job_id, referenced)

    monkeypatch.setattr(responses, "input_items", read)
    create(client, input=[{"role": "user", "content": "water"}] * 3)
    assert [name.partition("-")[0] for name in readers] == ["text"]

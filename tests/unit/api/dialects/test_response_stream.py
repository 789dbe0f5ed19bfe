"""A response's events: those of OpenAI's SDK, the same from any frontend, without gaps."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from api.errors import going_down
from api.ids import call_id
from shared.messages import FinishReason, JobState
from tests.unit.api.dialects.as_sent import as_sent
from tests.unit.api.dialects.response_logs import (
    JOB_ID,
    PIECES,
    TURNS,
    failed,
    finished,
    log_of,
    response_formatter,
    result,
    tokens,
)

EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
RESPONSE: Any = pydantic.TypeAdapter(Response)
TOKEN_IDS = st.lists(st.integers(1, len(PIECES) - 1), max_size=40)
SIZES = st.lists(st.integers(1, 6), max_size=40)
HELD = st.lists(st.integers(0, 5), max_size=40)
CALL = tokens("<tool_call>", '{"name": "get", "arguments": ', '{"x": 1', "}}", "</tool_call>")


def kinds(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def story(*pieces: int, reason: FinishReason = FinishReason.STOP, **members: Any) -> list[Any]:
    log = list(log_of(pieces))
    return result(response_formatter(TURNS, **members), log, finished(log, reason))


def test_a_text_is_formatted_as_openai_does() -> None:
    events = story(*tokens("a", "b"))
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    item = events[-1]["response"]["output"][0]
    assert item == {
        "id": f"msg_{JOB_ID}_0",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}],
    }
    assert events[-2]["item"] == item
    assert events[2]["item"] == {**item, "status": "in_progress", "content": []}
    assert [event["delta"] for event in events if "delta" in event] == ["a", "b"]
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    thoughts = tokens("<think>", "a", "b", "</think>", "\n")
    events = story(*thoughts, *tokens("words "), *CALL, *CALL)
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *[
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        * 2,
    ]
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert response["output"][3] == {
        "id": f"fc_{JOB_ID}_3",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id(JOB_ID, 0, 1),
        "name": "get",
        "arguments": '{"x": 1}',
    }
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_an_empty_answer_has_a_message_without_text() -> None:
    response = story()[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == ""


def test_one_that_is_cut_is_incomplete_and_so_is_its_last_item() -> None:
    events = story(*CALL[:3], reason=FinishReason.LENGTH)
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["output"][0]["arguments"] == '{"x": 1'


def test_a_background_response_is_queued_until_something_is_logged() -> None:
    made = response_formatter(background=True)
    assert kinds(list(made.opening())) == ["created", "queued"]
    assert made.so_far(has_started=False)["status"] == "queued"
    log = list(log_of(tokens("a")))
    assert kinds(list(made.delta(log[0])))[0] == "in_progress"
    assert made.so_far(has_started=True)["output"][0]["status"] == "in_progress"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("state", "status"), [(JobState.FAILED, "failed"), (JobState.CANCELLED, "cancelled")]
)
def test_an_abnormal_end_has_its_reason_and_keeps_the_text(
    state: JobState, status: str, background: bool
) -> None:
    log = list(log_of(tokens("a", "b")))
    end = failed(log, state)
    (*_, last) = result(response_formatter(background=background), log, end)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == status
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "It went wrong.",
        "type": "poison",
    }
    assert last["response"]["output"][0]["content"][0]["text"] == "ab"
    whole = response_formatter(background=background)
    for delta in log:
        whole.collect(delta)
    seen = whole.failed_response(end)
    assert {**seen, "error": last["response"]["error"]} == last["response"]
    assert (seen["error"] is None) is (status == "cancelled")


@pytest.mark.promise("Responses: a stream resumes after any event, at any frontend")
def test_what_ends_a_stream_alone_takes_no_number() -> None:
    made = response_formatter()
    last = list(made.opening())[-1]
    error = made.failed(going_down("Elsewhere."), last)
    assert error["type"] == "error"
    assert error["sequence_number"] == last["sequence_number"]
    (lost,) = made.job_failed(failed([], code="job_lost"), delivered=True)
    assert (lost["type"], lost["code"]) == ("error", "job_lost")
    assert made.delta(next(log_of(tokens("a"))))[0]["sequence_number"] == 2


def test_logprobs_go_with_the_text_of_their_tokens() -> None:
    log = list(log_of(tokens("a", "😀", "END"), shown=2, logprobs=True))
    events = result(response_formatter(has_logprobs=True), log, finished(log))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == ["a", "😀"]
    assert [len(event["logprobs"]) for event in deltas] == [1, 4]
    assert deltas[0]["logprobs"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "a", "logprob": -9999.0, "bytes": [97]},
        ],
    }
    part = events[-1]["response"]["output"][0]["content"][0]
    assert len(part["logprobs"]) == 5


def test_logprobs_of_reasoning_and_calls_are_left_out() -> None:
    pieces = tokens("<think>", "a", "</think>", "b", "<", "a") + CALL
    log = list(log_of(pieces, logprobs=True))
    response = result(response_formatter(TURNS, has_logprobs=True), log, finished(log))[-1][
        "response"
    ]
    text = response["output"][1]["content"][0]
    assert text["text"] == "b<a"
    assert [entry["token"] for entry in text["logprobs"]] == ["b", "<", "a"]


@pytest.mark.promise(
    "Responses: the same events with the same numbers, from any frontend, at any time, after any "
    "failure"
)
@settings(deadline=None)
@given(TOKEN_IDS, SIZES, HELD, st.booleans(), st.booleans(), st.data())
def test_events_do_not_depend_on_how_the_log_was_cut(
    token_ids: list[int],
    sizes: list[int],
    held: list[int],
    background: bool,
    logprobs: bool,
    data: st.DataObject,
) -> None:
    one_by_one = list(log_of(token_ids, logprobs=logprobs))
    length = len("".join(delta.text for delta in one_by_one))
    shown = data.draw(st.integers(0, length) | st.none())
    reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    streams, wholes = [], []
    for log in (
        list(log_of(token_ids, shown=shown, logprobs=logprobs)),
        list(log_of(token_ids, sizes, held, shown=shown, logprobs=logprobs)),
    ):
        made = response_formatter(TURNS, background=background, has_logprobs=logprobs)
        streams.append(result(made, log, finished(log, reason)))
        whole = response_formatter(TURNS, background=background, has_logprobs=logprobs)
        for delta in log:
            whole.collect(delta)
        wholes.append(as_sent(whole.whole(finished(log, reason))))
    assert streams[0] == streams[1]
    assert wholes[0] == wholes[1] == streams[0][-1]["response"]
    assert [event["sequence_number"] for event in streams[0]] == list(range(len(streams[0])))


@settings(deadline=None)
@given(TOKEN_IDS, SIZES, HELD)
def test_logged_text_is_known_without_its_tokens(
    token_ids: list[int], sizes: list[int], held: list[int]
) -> None:
    log = list(log_of(token_ids, sizes, held))
    outputs = []
    for read in (log, [delta._replace(token_ids=()) for delta in log]):
        made = response_formatter(TURNS)
        for delta in read:
            made.collect(delta)
        outputs.append(made.whole(finished(log))["output"])
    assert outputs[0] == outputs[1]


@pytest.mark.promise(
    "Responses: the SDK creates, streams, parses its events and gets the response, sync and async"
)
@settings(deadline=None)
@given(TOKEN_IDS, st.booleans())
def test_the_sdk_reads_every_event_and_builds_the_same_response(
    token_ids: list[int], background: bool
) -> None:
    log = list(log_of(token_ids, logprobs=True))
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    events = result(response_formatter(TURNS, background=background), log, finished(log))
    for event in events:
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]
        state.handle_event(parsed)
    final = state._completed_response
    assert final.to_dict() == RESPONSE.validate_python(events[-1]["response"]).to_dict() | {
        "output": final.to_dict()["output"]
    }
    reply = events[-1]["response"]["output"]
    assert [item.id for item in final.output] == [item["id"] for item in reply]
    texts = [
        part["text"] for item in reply if item["type"] == "message" for part in item["content"]
    ]
    assert final.output_text == "".join(texts)

"""Requests as they are stored: read as they were made, and in lines that turns have in common."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from api.dialects.responses.items import input_items
from api.dialects.responses.record import (
    StoredRequest,
    decode_request,
    encode_request,
    stored_request,
)
from api.output_parsers.parser import ParserConfig, Thinking
from shared.messages import InvalidParameter, SamplingParams
from shared.text.tool_formats import ReasoningFormat, ToolFormat
from shared.transport.record_parts import GROUP_PARTS, split_record
from tests.unit.api.dialects.response_logs import CARD, JOB_ID
from tests.unit.api.dialects.test_response_items import TOOL, request

PARSER = ParserConfig(
    tool_format=ToolFormat.HERMES,
    names=("get",),
    reasoning_format=ReasoningFormat.THINK,
    thinking=Thinking.OPEN,
)


def test_a_request_survives_being_stored_and_is_bounded() -> None:
    made = request(tools=[TOOL], metadata={"a": "é"}, instructions="x")
    stored = stored_request(
        made, CARD, PARSER, input_items(made.input, JOB_ID), 7, SamplingParams()
    )
    assert decode_request(encode_request(stored, JOB_ID), JOB_ID) == stored
    large = stored_request(
        made, CARD, PARSER, input_items("a" * 2**20, JOB_ID), 7, SamplingParams()
    )
    with pytest.raises(InvalidParameter, match="input"):
        encode_request(large, JOB_ID)


def conversation(num_turns: int) -> list[dict[str, Any]]:
    """Returns items of which some are not kept: a call and a result in each turn."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "é\n" * 400}]
    for turn in range(num_turns):
        call = {"type": "function_call", "call_id": f"c{turn}", "name": "get", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": f"c{turn}", "output": "x" * 700}
        items += [{"type": "configuration_update"}, {"role": "assistant", "content": "é"}]
        items += [call, result]
    return items


def record_of(num_turns: int, job_id: str, **members: Any) -> tuple[StoredRequest, str]:
    made = request(
        tools=[{**TOOL, "name": f"get{n}"} for n in range(3)],
        instructions="i" * 900,
        input=conversation(num_turns),
        **members,
    )
    items = input_items(made.input, job_id)
    stored = stored_request(made, CARD, PARSER, items, num_turns, SamplingParams())
    return stored, encode_request(stored, job_id)


def test_a_large_request_is_stored_in_lines_that_the_next_turn_has_too() -> None:
    other_id = JOB_ID[:-1] + "2"
    stored, text = record_of(30, JOB_ID, previous_response_id="resp_1", metadata={"turn": "1"})
    _, following = record_of(31, other_id, max_output_tokens=7, metadata={"turn": "2"})
    read = decode_request(text, JOB_ID)
    assert read == stored
    assert json.dumps(read.input) == json.dumps(stored.input), "members in their order"
    assert JOB_ID not in text
    lines, following_lines = text.split("\n")[1:], following.split("\n")[1:]
    assert len(lines) > 90
    assert len(set(lines) - set(following_lines)) == 1, "the metadata"
    assert following_lines[-1] == lines[-1] == "]}"
    # Their parts, too: but for the head, the last few items and the new ones.
    (_, parts), (_, following_parts) = (split_record("t", one) for one in (text, following))
    assert len(following_parts.keys() - parts.keys()) <= 4


def test_the_parts_of_a_record_make_it_again() -> None:
    _, text = record_of(200, JOB_ID)
    index, parts = split_record("t", text)
    assert len(index) < 40 * GROUP_PARTS
    size, *rest = index.split("\n")
    pieces: list[str] = []
    for line in rest:
        mark, value = line[0], line[1:]
        if mark == " ":
            pieces.append(value)
            continue
        group = parts[value].decode() if mark == "=" else value
        digests = [group[at : at + 20] for at in range(0, len(group), 20)]
        pieces += [parts[digest].decode() for digest in digests]
    assert "\n".join(pieces) == text
    assert size == f"#{len(text.encode())}"


def test_small_requests_and_those_of_older_releases_have_ids() -> None:
    stored, text = record_of(30, JOB_ID)
    assert "\n" in text
    small = stored_request(request(), CARD, PARSER, input_items("hi", JOB_ID), 7, SamplingParams())
    assert "\n" not in encode_request(small, JOB_ID)
    assert JOB_ID in encode_request(small, JOB_ID)
    older = msgspec.json.encode(stored).decode()
    assert decode_request(older, JOB_ID) == stored

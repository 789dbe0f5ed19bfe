"""Jobs, entries and frames: what is written is read back, what is malformed is an error."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import (
    Cursor,
    Delta,
    ErrorCode,
    Failed,
    Finished,
    Job,
    JobState,
    OnDisconnect,
    SamplingParams,
    Started,
    TokenLogprob,
    Usage,
)
from shared.transport.wire import (
    PayloadInvalid,
    decode_entry,
    decode_frame,
    decode_job,
    decode_logprobs,
    decode_stop_reason,
    encode_job,
    encode_logprobs,
    encode_stop_reason,
    encode_token_ids,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
token_id = st.integers(0, 2**31 - 1)
logprob = st.floats(max_value=0, allow_nan=False)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 1000),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    logit_bias=st.dictionaries(token_id, st.floats(-100, 100), max_size=5),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(text.filter(bool), max_size=3).map(tuple),
    stop_token_ids=st.lists(token_id, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
jobs = st.builds(
    Job,
    job_id=text,
    model=text,
    prompt_token_ids=st.lists(token_id, max_size=20).map(tuple),
    sampling=sampling,
    kind=st.sampled_from(["chat", "completion", "generate"]),
    tenant=text,
    lane=st.integers(0, 7),
    timeout_ms=st.integers(1, 10**9),
    on_disconnect=st.sampled_from(OnDisconnect),
    client_request_id=st.none() | text,
)
token_logprobs = st.builds(
    TokenLogprob,
    token_id,
    logprob,
    st.lists(st.tuples(token_id, logprob), max_size=3).map(tuple),
)
JOB = Job(
    job_id="0-a",
    model="m",
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(seed=1, logit_bias={5: -1.0}),
    kind="chat",
)


@given(jobs)
def test_a_job_survives_the_wire(job: Job) -> None:
    assert decode_job(encode_job(job)) == job


def test_members_of_a_newer_release_are_ignored() -> None:
    payload = json.loads(encode_job(JOB))
    payload["colour"] = "blue"
    payload["sampling"]["magic"] = {"deep": [1]}
    assert decode_job(json.dumps(payload).encode()) == JOB


def test_members_that_an_older_release_did_not_write_have_their_defaults() -> None:
    payload = json.loads(encode_job(JOB))
    for name in ("tenant", "lane", "timeout_ms", "on_disconnect", "client_request_id"):
        del payload[name]
    assert decode_job(json.dumps(payload).encode()) == JOB


@pytest.mark.parametrize(
    "damage",
    [
        {"job_id": 5},
        {"prompt_token_ids": ["a"]},
        {"prompt_token_ids": None},
        {"sampling": {"temperature": 9}},
        {"sampling": {"max_tokens": "many"}},
        {"sampling": {"logit_bias": {"x": 1}}},
        {"on_disconnect": "explode"},
    ],
)
def test_a_malformed_member_is_payload_invalid(damage: dict[str, Any]) -> None:
    payload = json.loads(encode_job(JOB)) | damage
    with pytest.raises(PayloadInvalid, match="malformed") as caught:
        decode_job(json.dumps(payload).encode())
    assert caught.value.code is ErrorCode.PAYLOAD_INVALID


@given(st.binary(max_size=60))
def test_bytes_that_are_no_job_are_payload_invalid(payload: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        decode_job(payload)


def test_deeply_nested_payloads_are_payload_invalid() -> None:
    with pytest.raises(PayloadInvalid):
        decode_job(b'{"x":' * 100_000)


@given(st.none() | st.lists(token_logprobs, max_size=4).map(tuple))
def test_logprobs_survive_the_wire(logprobs: tuple[TokenLogprob, ...] | None) -> None:
    encoded = encode_logprobs(logprobs)
    assert b"|" not in encoded
    assert decode_logprobs(encoded) == logprobs


def test_minus_infinity_is_null() -> None:
    entry = (TokenLogprob(1, -math.inf),)
    assert encode_logprobs(entry) == b"[[1,null,[]]]"
    assert decode_logprobs(b"[[1,null,[]]]") == entry


@given(st.none() | st.integers(0, 2**31) | text)
def test_stop_reasons_survive_the_wire(stop_reason: str | int | None) -> None:
    encoded = encode_stop_reason(stop_reason)
    assert "|" not in encoded
    assert decode_stop_reason(encoded.encode()) == stop_reason


@pytest.mark.promise(
    "Runtime: typed, versioned messages from worker to frontend (the version stands in queue entry "
    "and job, not in each frame)"
)
@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.lists(token_id, max_size=5).map(tuple),
    text,
    st.booleans(),
)
def test_entry_and_frame_of_a_delta_say_the_same(
    n0: int, b0: int, token_ids: tuple[int, ...], words: str, with_logprobs: bool
) -> None:
    logprobs = tuple(TokenLogprob(one, -1.0) for one in token_ids) if with_logprobs else None
    end = Cursor(n0 + len(token_ids), b0 + len(words.encode()))
    delta = Delta(Cursor(n0, b0), end, token_ids, words, logprobs)
    ids, lp = encode_token_ids(token_ids).encode(), encode_logprobs(logprobs)
    fields = {b"t": ids, b"d": words.encode(), b"lp": lp, b"new": b"?"}
    assert decode_entry(str(end).encode(), fields) == delta
    numbers = b"%d|%d|%d" % (n0, end.num_tokens, end.num_bytes)
    assert decode_frame(b"|".join((b"D", numbers, ids, lp, words.encode()))) == delta


def test_frames_of_starts_and_ends_are_read() -> None:
    assert decode_frame(b"S|3|host|7") == Started("host|7", 3)
    assert decode_frame(b'E|2|finished|stop|9|4|1|"a"|') == Finished(
        Cursor(2, 9),
        "stop",
        Usage(4, 2, 1),
        "a",  # type: ignore[arg-type]
    )
    timed = decode_frame(b"E|2|finished|stop|9|4|1||1700000000123")
    assert isinstance(timed, Finished)
    assert timed.ended_ms == 1_700_000_000_123
    assert decode_frame(b"E|2|failed|newer_code|9|4|1||Oh|no") == Failed(
        Cursor(2, 9), JobState.FAILED, "newer_code", "Oh|no", Usage(4, 2, 1)
    )
    assert decode_frame(b"Q|what") is None
    assert decode_entry(b"1-2", {b"k": b"note"}) is None


@pytest.mark.parametrize(
    "frame", [b"D|1|2", b"D|a|b|c||||", b"S|x|w", b"E|1|sleeping|stop|1|1|1||", b"D|0|1|1|x||a"]
)
def test_malformed_frames_are_value_errors(frame: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_frame(frame)

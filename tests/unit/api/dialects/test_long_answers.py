"""Answers of many megabytes: the same JSON in pieces, and the loop's turns while they are made."""

from __future__ import annotations

import asyncio
import json
import math
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.dialects.chat.formatter import ChatFormatter
from api.dialects.completions.formatter import CompletionFormatter, CompletionShape
from api.generation.formatter import COMPLETION_ENTRY_BYTES, ResponseContext
from api.generation.sampling import ResponseSize
from api.http.json_response import send_json
from api.http.sse import PLAIN, TYPED, json_bytes, json_pieces
from api.http.time_slices import TimeSlices
from api.jobs.sent_events import MANY_TOKENS, split_long
from shared.messages import (
    START,
    Cursor,
    Delta,
    Finished,
    FinishReason,
    InvalidParameter,
    SamplingParams,
    Segment,
    TokenLogprob,
    Usage,
)
from tests.unit.api.dialects.letter_tokenizer import LetterTokenizer

TOKENIZER = LetterTokenizer([b"<end>", b"a", b"b", "\u2028".encode(), b"\xf0", b'"'])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=80)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=200,
)


@given(JSON)
def test_the_pieces_of_a_payload_are_its_json(payload: Any) -> None:
    assert b"".join(json_pieces(payload)) == json_bytes(payload)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_the_pieces_of_an_event_are_the_event(payload: dict[str, Any]) -> None:
    named = {**payload, "type": "message"}
    for framing in (PLAIN, TYPED):
        assert b"".join(framing.event_pieces(named)) == framing.event(named)


@pytest.mark.parametrize("length", [0, 1, 64, 65, 1000])
def test_an_iterator_is_a_list_in_one_go_and_in_pieces(length: int) -> None:
    expected = json.dumps({"a": list(range(length))}, separators=(",", ":")).encode()
    assert json_bytes({"a": iter(range(length))}) == expected
    assert b"".join(json_pieces({"a": iter(range(length))})) == expected


def logprobs_of(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple((1 + (token_id + k) % 5, -0.25 - k) for k in range(num_top))
    return TokenLogprob(token_id, -0.25, (*top[:-1], (4, -math.inf)) if top else ())


def big_delta(num_choices: int, num_tokens: int, num_top: int, start: Cursor = START) -> Delta:
    """So many tokens of each choice, one after the other; every one stands for the text "a"."""
    token_ids = tuple(1 for _ in range(num_choices * num_tokens))
    end = Cursor(start.num_tokens + len(token_ids), start.num_bytes + len(token_ids))
    segments = tuple(Segment(choice, num_tokens, num_tokens) for choice in range(num_choices))
    logprobs = tuple(logprobs_of(token_id, num_top) for token_id in token_ids)
    return Delta(start, end, token_ids, "a" * len(token_ids), logprobs, segments)


def ended(delta: Delta, num_choices: int) -> tuple[Delta, Finished]:
    """The choices' ends, and the job's."""
    segments = tuple(Segment(choice, 0, 0, FinishReason.LENGTH) for choice in range(num_choices))
    last = Delta(delta.end, delta.end, (), "", (), segments)
    return last, Finished(delta.end, FinishReason.LENGTH, Usage(3, delta.end.num_tokens))


def context_of(num_choices: int, num_logprobs: int) -> ResponseContext:
    return ResponseContext(
        id="x-1", model="m", created_s=7, num_choices=num_choices, num_logprobs=num_logprobs
    )


def chat_token(token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": TOKENIZER.token_text(token_id),
        "logprob": max(logprob, -9999.0),
        "bytes": list(TOKENIZER.token_bytes(token_id)),
    }


def test_a_chat_answer_in_pieces_has_every_entry_as_openai_writes_it() -> None:
    num_choices, num_tokens, num_top = 3, 70, 5
    delta = big_delta(num_choices, num_tokens, num_top)
    last, end = ended(delta, num_choices)
    formatter = ChatFormatter(context_of(num_choices, num_top), TOKENIZER)
    for part in (*split_long(delta), last):
        formatter.collect(part)
    entry = logprobs_of(1, num_top)
    expected = {
        **chat_token(1, entry.logprob),
        "top_logprobs": [chat_token(*other) for other in entry.top],
    }
    answer = formatter.whole(end)
    sent = b"".join(json_pieces(answer))
    assert sent == json_bytes(answer)
    assert b"\xe2\x80\xa8" not in sent, "a line end to those who split with str.splitlines()"
    read = json.loads(sent)
    assert [choice["index"] for choice in read["choices"]] == [0, 1, 2]
    for choice in read["choices"]:
        assert choice["message"]["content"] == "a" * num_tokens
        assert choice["logprobs"] == {"content": [expected] * num_tokens, "refusal": None}
    assert list(expected) == list(read["choices"][0]["logprobs"]["content"][0]), "in this order"


def test_a_completion_in_pieces_has_every_entry_as_openai_writes_it() -> None:
    num_choices, num_tokens, num_top = 3, 70, 3
    delta = big_delta(num_choices, num_tokens, num_top)
    last, end = ended(delta, num_choices)
    answers = []
    for encode in (json_bytes, lambda answer: b"".join(json_pieces(answer))):
        formatter = CompletionFormatter(
            context_of(num_choices, num_top), TOKENIZER, CompletionShape(best_of=3, n=3)
        )
        for part in (*split_long(delta), last):
            formatter.collect(part)
        answers.append(encode(formatter.whole(end)))
    assert answers[0] == answers[1]
    top = {"b": -0.25, "a": -0.25, "\u2028": -1.25, "bytes:\\xf0": -9999.0}  # the chosen one too
    for choice in json.loads(answers[0])["choices"]:
        assert choice["logprobs"] == {
            "tokens": ["a"] * num_tokens,
            "token_logprobs": [-0.25] * num_tokens,
            "top_logprobs": [top] * num_tokens,
            "text_offset": list(range(num_tokens)),
        }


def echoing(num_choices: int, num_bytes: int) -> CompletionFormatter:
    """A completion of one prompt that each of its choices repeats."""
    shape = CompletionShape(best_of=num_choices, n=num_choices, echoes=("w\u2028" * num_bytes,))
    made = ResponseContext(id="x-1", model="m", created_s=7, num_choices=num_choices)
    return CompletionFormatter(made, TOKENIZER, shape)


def test_choices_that_repeat_their_prompt_share_one_copy_of_it() -> None:
    num_choices, num_chars = 64, 20_000
    formatter = echoing(num_choices, num_chars)
    delta = big_delta(num_choices, 1, 0)
    last, end = ended(delta, num_choices)
    for part in (delta, last):
        formatter.collect(part)
    tracemalloc.start()
    try:
        answer = formatter.whole(end)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < num_choices * num_chars
    sent = b"".join(json_pieces(answer))
    assert sent == json_bytes(answer)
    texts = [choice["text"] for choice in json.loads(sent)["choices"]]
    assert texts == ["w\u2028" * num_chars + "a"] * num_choices


def test_parts_of_a_long_delta_add_up_to_it() -> None:
    delta = big_delta(5, MANY_TOKENS // 2, 1)
    parts = split_long(delta)
    assert [len(part.token_ids) for part in parts] == [MANY_TOKENS, MANY_TOKENS, MANY_TOKENS // 2]
    assert "".join(part.text for part in parts) == delta.text
    assert (parts[0].start, parts[-1].end) == (delta.start, delta.end)
    assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert sum((part.segments or () for part in parts), ()) == delta.segments
    whole = Delta(delta.start, delta.end, delta.token_ids, delta.text)
    assert list(split_long(whole)) == [whole], "it cannot be cut"


class Client:
    """Takes an answer's messages. A slow one makes each send wait for several turns."""

    def __init__(self, wait_turns: int = 0) -> None:
        self.start: Any = None
        self.bodies: list[bytes] = []
        self.unread = 0
        self._wait_turns = wait_turns

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        self.bodies.append(message["body"])
        for _ in range(self._wait_turns):
            await asyncio.sleep(0)

    @property
    def header_names(self) -> set[bytes]:
        return {name for name, _ in self.start["headers"]}


async def test_a_small_answer_is_one_message_with_its_length() -> None:
    client = Client()
    await send_json(client, {"a": 1}, TimeSlices())
    assert client.bodies == [b'{"a":1}']
    assert client.header_names == {b"content-type", b"content-length"}


def long_answer() -> dict[str, Any]:
    """About ten megabytes that take long in one go."""
    item = {"token": "a", "logprob": -0.25, "bytes": [97], "top": [{"b": -1.5}] * 20}
    return {"content": [item] * 30_000}


async def longest_turn(work: asyncio.Task[Any]) -> float:
    """The most CPU seconds between two turns of this task while `work` runs."""
    longest_s = 0.0
    while not work.done():
        begun_s = time.thread_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.thread_time() - begun_s)
    work.result()
    return longest_s


@pytest.mark.promise(
    "Streaming: a long response does not block the event loop, and its size is limited by its "
    "request"
)
async def test_the_loop_has_its_turns_while_a_long_answer_is_sent() -> None:
    answer = long_answer()
    begun_s = time.thread_time()
    in_one_go = json_bytes(answer)
    in_pieces = b"".join(json_pieces(answer))
    total_s = time.thread_time() - begun_s
    assert in_one_go == in_pieces
    client = Client()
    sending = asyncio.create_task(send_json(client, answer, TimeSlices()))
    longest_s = await longest_turn(sending)
    assert b"".join(client.bodies) == in_one_go
    assert client.header_names == {b"content-type"}, "its length is not known when it begins"
    assert longest_s < total_s / 4, f"{longest_s} of {total_s}"


async def test_several_long_answers_hold_the_loop_no_longer_than_one() -> None:
    slices, answer = TimeSlices(), long_answer()
    begun_s = time.thread_time()
    size = sum(map(len, json_pieces(answer)))
    total_s = time.thread_time() - begun_s
    clients = [Client() for _ in range(6)]
    sending = asyncio.gather(*(send_json(client, answer, slices) for client in clients))
    longest_s = await longest_turn(asyncio.ensure_future(sending))
    assert [sum(map(len, client.bodies)) for client in clients] == [size] * len(clients)
    # The first slice of each asks nobody: six of them may come in one turn.
    assert longest_s < total_s / 2, f"{longest_s} of {total_s}"


async def test_a_reader_that_waits_is_waited_for() -> None:
    made = 0

    def parts() -> Iterator[int]:
        nonlocal made
        for number in range(200_000):
            made = number
            yield number

    unsent: list[int] = []

    class Slow(Client):
        async def __call__(self, message: Any) -> None:
            await super().__call__(message)
            unsent.append(made)

    client = Slow(wait_turns=3)
    await send_json(client, {"a": parts()}, TimeSlices())
    bodies = [body for body in client.bodies if body]
    assert len(bodies) > 5
    assert unsent[0] < 200_000 / 2, "what is not sent yet is not made yet"


def test_a_long_answer_takes_no_more_memory_than_a_few_of_its_own_size() -> None:
    num_choices, num_top = 16, 20
    formatter = ChatFormatter(context_of(num_choices, num_top), TOKENIZER)
    delta = big_delta(num_choices, 100, num_top)
    tracemalloc.start()
    try:
        formatter.collect(delta)
        last, end = ended(delta, num_choices)
        formatter.collect(last)
        held, _ = tracemalloc.get_traced_memory()
        size = 0
        for piece in json_pieces(formatter.whole(end)):
            size += len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 1_000_000
    assert held < 2 * size
    assert peak < 3 * size


class TestAnswerSize:
    def test_a_default_of_max_tokens_is_what_fits(self) -> None:
        size = ResponseSize(
            choices=(("n", 4),), max_tokens=("max_tokens", None), logprobs=("top_logprobs", 20)
        )
        fitted = size.fitted(SamplingParams(max_tokens=1_000_000), 2**20)
        num_bytes = 4 * fitted.max_tokens * size.token_bytes
        assert 2**20 - 4 * size.token_bytes < num_bytes <= 2**20

    def test_a_refusal_names_the_parameters(self) -> None:
        size = ResponseSize(
            choices=(("prompts", 2), ("n", 8)),
            max_tokens=("max_completion_tokens", 1000),
            logprobs=("logprobs", 5),
            entry_bytes=COMPLETION_ENTRY_BYTES,
        )
        with pytest.raises(InvalidParameter) as refused:
            size.fitted(SamplingParams(max_tokens=1000), 2**20)
        assert refused.value.param == "max_completion_tokens"
        assert refused.value.code == "answer_too_large"
        for word in ("prompts 2", "n 8", "max_completion_tokens 1000", "logprobs 5", str(2**20)):
            assert word in refused.value.message

    @pytest.mark.parametrize(
        ("num_choices", "max_tokens", "num_top"),
        [(1, 4096, 20), (1, 32_000, 20), (128, 4096, None), (1, 1_000_000, None), (128, 250, 20)],
    )
    def test_common_requests_fit_the_default(
        self, num_choices: int, max_tokens: int, num_top: int | None
    ) -> None:
        size = ResponseSize(
            choices=(("n", num_choices),),
            max_tokens=("max_tokens", max_tokens),
            logprobs=("top_logprobs", num_top),
        )
        sampling = SamplingParams(max_tokens=max_tokens)
        assert size.fitted(sampling, 64 * 2**20) == sampling

    def test_the_estimate_is_no_less_than_what_an_answer_has(self) -> None:
        num_top = 20
        tokenizer = LetterTokenizer([b"<end>", *(b" word%d" % k for k in range(40))])
        entry = TokenLogprob(7, -1.2345678901234567, tuple((1 + k, -9.87654321) for k in range(20)))
        formatter = ChatFormatter(context_of(1, num_top), tokenizer)
        delta = Delta(START, Cursor(50, 300), (7,) * 50, " word6" * 50, (entry,) * 50)
        formatter.collect(delta)
        answer = formatter.whole(Finished(delta.end, FinishReason.STOP, Usage(3, 50)))
        size = ResponseSize(max_tokens=("max_tokens", 50), logprobs=("top_logprobs", num_top))
        assert len(msgspec.json.encode(answer)) < 50 * size.token_bytes

"""Events of a job in each dialect, member by member."""

from __future__ import annotations

import math
from typing import Any

import pytest

from api.dialects.chat.formatter import ChatFormatter
from api.dialects.completions.formatter import CompletionFormatter
from api.dialects.generate.formatter import GenerateFormatter
from api.errors import ServerError
from api.generation.formatter import ResponseContext, Timing
from shared.messages import START, Cursor, Delta, Finished, FinishReason, TokenLogprob, Usage
from tests.unit.api.dialects.as_sent import as_sent
from tests.unit.api.dialects.letter_tokenizer import LetterTokenizer

EMOJI = "😀".encode()
TOKENIZER = LetterTokenizer([b"<end>", b"a", b"b", b"END", *(bytes([byte]) for byte in EMOJI)])
CONTEXT = {"id": "chatcmpl-1", "model": "m", "created_s": 7}
USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)


def delta(start: Cursor, token_ids: tuple[int, ...], text: str, *, logprobs: bool = False) -> Delta:
    return Delta(
        start,
        Cursor(start.num_tokens + len(token_ids), start.num_bytes + len(text.encode())),
        token_ids,
        text,
        tuple(TokenLogprob(token, -0.5, ((token, -0.5), (1, -math.inf))) for token in token_ids)
        if logprobs
        else None,
    )


def finished(end: Cursor, reason: FinishReason = FinishReason.STOP, **more: Any) -> Finished:
    return Finished(end, reason, USAGE, **more)


def chat(**members: Any) -> ChatFormatter:
    return ChatFormatter(ResponseContext(**{**CONTEXT, **members}), TOKENIZER)


@pytest.mark.promise(
    "Chat: absent members of a delta are absent (`finish_reason` is null until the last chunk, as "
    "OpenAI sends it)"
)
def test_a_chat_stream_has_the_members_of_openais() -> None:
    formatter = chat()
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    none = {"index": 0, "logprobs": None, "finish_reason": None}
    first = delta(START, (1,), "a")
    assert list(formatter.opening()) == [
        {**base, "choices": [{**none, "delta": {"role": "assistant", "content": ""}}]}
    ]
    assert list(formatter.delta(first)) == [
        {**base, "choices": [{**none, "delta": {"content": "a"}}]}
    ]
    assert list(formatter.finished(finished(first.end))) == [
        {**base, "choices": [{**none, "delta": {}, "finish_reason": "stop"}]}
    ]


@pytest.mark.promise("Chat: usage only in its own chunk, and only when requested")
def test_usage_is_null_until_its_own_chunk() -> None:
    formatter = chat(include_usage=True)
    chunks = [*formatter.opening(), *formatter.delta(delta(START, (1,), "a"))]
    *rest, last = formatter.finished(finished(Cursor(1, 1)))
    assert all(chunk["usage"] is None for chunk in (*chunks, *rest))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.promise(
    "Runtime: no empty events except the last (towards clients; the log holds every token)"
)
def test_text_that_is_held_back_makes_no_event() -> None:
    formatter = chat(prompt_token_ids=(9,))
    held = delta(START, (3,), "")
    assert list(formatter.delta(held)) == []
    (chunk,) = formatter.delta(delta(held.end, (1,), "ENDa"))
    assert chunk["choices"][0]["token_ids"] == [3, 1]


def test_a_whole_answer_is_the_stream_put_together() -> None:
    formatter = CompletionFormatter(
        ResponseContext(**{**CONTEXT, "prompt_token_ids": (9,)}),  # type: ignore[arg-type]
        TOKENIZER,
    )
    first = delta(START, (1,), "a")
    for event in (first, delta(first.end, (2, 0), "b")):
        formatter.collect(event)
    answer = formatter.whole(finished(Cursor(3, 2), stop_reason=0))
    assert answer["object"] == "text_completion"
    assert answer["prompt_token_ids"] == (9,)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "ab",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": 0,
            "token_ids": [1, 2, 0],
        }
    ]


def test_an_error_is_the_object_that_an_answer_would_have() -> None:
    error = ServerError("broken", "engine_error")
    assert chat().failed(error) == error.body()
    native = GenerateFormatter("gen-1", "m", Timing())
    assert native.failed(error) == {"text": "", "token_ids": [], **error.body()}


def tokens_of(choice: dict[str, Any]) -> list[str]:
    logprobs = as_sent(choice["logprobs"])
    return [] if logprobs is None else [entry["token"] for entry in logprobs["content"]]


def test_logprobs_wait_for_their_text_and_vanish_with_a_stop_string() -> None:
    formatter = chat(num_logprobs=1)
    first = delta(START, (1, 3), "a", logprobs=True)  # "a", then a possible stop string
    (chunk,) = formatter.delta(first)
    assert tokens_of(chunk["choices"][0]) == ["a"]
    second = delta(first.end, (2,), "ENDb", logprobs=True)  # it was none
    (chunk,) = formatter.delta(second)
    assert tokens_of(chunk["choices"][0]) == ["END", "b"]
    third = delta(second.end, (3, 0), "", logprobs=True)  # now it is
    assert list(formatter.delta(third)) == []
    (last,) = formatter.finished(finished(third.end, stop_reason="END"))
    assert tokens_of(last["choices"][0]) == []


def test_logprobs_of_an_open_character_come_with_the_character() -> None:
    formatter = chat(num_logprobs=1)
    opening = delta(START, (4, 5, 6), "", logprobs=True)
    assert list(formatter.delta(opening)) == []
    (chunk,) = formatter.delta(delta(opening.end, (7,), "😀", logprobs=True))
    entries = as_sent(chunk)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == EMOJI


def test_a_text_cut_at_its_length_shows_all_its_logprobs() -> None:
    formatter = chat(num_logprobs=1)
    first = delta(START, (1, 4), "a", logprobs=True)
    formatter.delta(first)
    tail = delta(first.end, (), "\ufffd")
    formatter.delta(tail)
    (last,) = formatter.finished(finished(tail.end, FinishReason.LENGTH))
    assert len(tokens_of(last["choices"][0])) <= 1
    whole = chat(num_logprobs=1)
    whole.collect(first)
    whole.collect(tail)
    assert len(tokens_of(whole.whole(finished(tail.end, FinishReason.LENGTH))["choices"][0])) == 2


def test_json_never_sees_an_infinite_logprob() -> None:
    formatter = chat(num_logprobs=2)
    (chunk,) = formatter.delta(delta(START, (2,), "b", logprobs=True))
    top = as_sent(chunk)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.5, -9999.0]


def test_the_older_logprobs_have_offsets_and_the_chosen_token() -> None:
    context = ResponseContext(**{**CONTEXT, "num_logprobs": 1})  # type: ignore[arg-type]
    formatter = CompletionFormatter(context, TOKENIZER)
    formatter.collect(delta(START, (1, 4, 5, 6, 7, 2), "a😀b", logprobs=True))
    logprobs = as_sent(formatter.whole(finished(Cursor(6, 6))))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [
        "a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b",
    ]  # fmt: skip
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 6
    assert logprobs["top_logprobs"][5] == {"b": -0.5, "a": -9999.0}


def test_the_native_dialect_marks_first_and_last() -> None:
    timing = Timing(submitted_s=100.0)
    timing.first_token_s = 100.01234
    formatter = GenerateFormatter("gen-1", "m", timing)
    assert list(formatter.delta(delta(START, (3,), ""))) == []
    (first,) = formatter.delta(delta(Cursor(1, 0), (1,), "ENDa"))
    assert (first["text"], first["token_ids"]) == ("ENDa", [3, 1])
    assert (first["is_first"], first["ttft_ms"]) == (True, 12.3)
    (last,) = formatter.finished(finished(Cursor(2, 4)))
    assert (last["text"], last["token_ids"], last["done"]) == ("", [], True)
    assert (last["full_text"], last["finish_reason"]) == ("ENDa", "stop")
    assert "is_first" not in last

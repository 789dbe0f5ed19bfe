"""Calls, reasoning and their log probabilities in the chat dialect, chunk by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from api.dialects.chat.formatter import ChatFormatter
from api.generation.formatter import ResponseContext
from api.output_parsers.parser import OutputParserFactory, ParserConfig, Thinking
from shared.messages import (
    START,
    Cursor,
    Delta,
    Finished,
    FinishReason,
    Segment,
    TokenLogprob,
    Usage,
)
from shared.text.tool_formats import ReasoningFormat, ToolFormat
from tests.support.examples import examples
from tests.unit.api.dialects.as_sent import as_sent
from tests.unit.api.dialects.letter_tokenizer import LetterTokenizer

TOKENIZER = LetterTokenizer([b"<end>", *(bytes([byte]) for byte in range(1, 256))])
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
THOUGHT = "<think>hm é</think>\n"


def chat_formatter(**members: Any) -> ChatFormatter:
    config = ParserConfig(
        tool_format=ToolFormat.HERMES,
        names=("f",),
        reasoning_format=ReasoningFormat.THINK,
        thinking=Thinking.MAYBE,
    )
    base = {"id": "chatcmpl-1", "model": "m", "created_s": 7}
    return ChatFormatter(
        ResponseContext(**{**base, **members}),
        TOKENIZER,
        OutputParserFactory(config, "s"),
        counts_reasoning=True,
    )


def tokens(text: str, cuts: Sequence[int] = ()) -> list[Delta]:
    """A delta for each piece of the text's bytes, which are its tokens; the cuts are tokens."""
    raw = text.encode()
    bounds = [0, *sorted(cuts), len(raw)]
    found: list[Delta] = []
    detokenizer = TOKENIZER.detokenizer()
    start = START
    for begin, end in itertools.pairwise(bounds):
        token_ids = tuple(raw[begin:end])
        output = detokenizer.push(token_ids)
        stop = Cursor(start.num_tokens + len(token_ids), start.num_bytes + len(output.encode()))
        logprobs = tuple(TokenLogprob(token, -0.5) for token in token_ids)
        found.append(Delta(start, stop, token_ids, output, logprobs))
        start = stop
    return found


def finished(deltas: Sequence[Delta], reason: FinishReason = FinishReason.STOP) -> Finished:
    end = deltas[-1].end
    return Finished(end, reason, Usage(3, end.num_tokens))


def whole(text: str, reason: FinishReason = FinishReason.STOP, **members: Any) -> dict[str, Any]:
    answer, deltas = chat_formatter(**members), tokens(text)
    for delta in deltas:
        answer.collect(delta)
    return dict(as_sent(answer.whole(finished(deltas, reason))))


def streamed(
    deltas: Sequence[Delta], reason: FinishReason = FinishReason.STOP, **members: Any
) -> list[dict[str, Any]]:
    answer = chat_formatter(**members)
    chunks = [*answer.opening()]
    for delta in deltas:
        chunks += answer.delta(delta)
    return list(as_sent([*chunks, *answer.finished(finished(deltas, reason))]))


def put_together(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice as clients put it together: the members of a whole answer's choice."""
    message: dict[str, Any] = {}
    entries: list[Any] = []
    finish_reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = dict(choice["delta"])
            for call in delta.pop("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                at = call["index"]
                if at == len(calls):
                    calls.append({"id": "", "type": "", "function": {"name": "", "arguments": ""}})
                calls[at]["id"] += call.get("id", "")
                calls[at]["type"] += call.get("type", "")
                for name, text in call["function"].items():
                    calls[at]["function"][name] += text
            for name, text in delta.items():
                message[name] = message.get(name, "") + text
            entries += (choice["logprobs"] or {"content": []})["content"]
            finish_reason = finish_reason or choice["finish_reason"]
    return {"message": message, "logprobs": entries, "finish_reason": finish_reason}


def test_the_deltas_of_a_call() -> None:
    deltas = tokens(CALL, range(1, len(CALL.encode())))
    output = [chunk["choices"][0] for chunk in streamed(deltas)]
    begun = output[1]["delta"]["tool_calls"][0]
    assert begun == {
        "index": 0,
        "id": begun["id"],
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert [choice["delta"] for choice in output[2:-1]] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in '{"a": "é"}'
    ]
    assert output[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in output] == [None] * (len(output) - 1) + [
        "tool_calls"
    ]


def test_a_possible_marker_is_held_back() -> None:
    answer = chat_formatter()
    first, second = tokens("so <tool_ca!", (11,))
    (chunk,) = answer.delta(first)
    assert chunk["choices"][0]["delta"] == {"content": "so"}
    (chunk,) = answer.delta(second)
    assert chunk["choices"][0]["delta"] == {"content": " <tool_ca!"}


def test_a_choice_that_was_cut_off_in_a_call_ends_by_its_length() -> None:
    (choice,) = whole(CALL[:-20], FinishReason.LENGTH)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


def test_reasoning_tokens_are_counted_by_where_they_begin() -> None:
    answer = whole(f"{THOUGHT}yes")
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len("<think>hm é</think>".encode())  # a token is a byte here
    assert whole("yes")["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    cut = whole("<think>hm", FinishReason.LENGTH)["usage"]
    assert cut["completion_tokens_details"]["reasoning_tokens"] == cut["completion_tokens"]


def test_log_probabilities_are_those_of_the_content() -> None:
    text = f"{THOUGHT}I né <tool{CALL} so"
    (choice,) = whole(text, num_logprobs=0)["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "I né <toolso"
    assert choice["message"]["content"] == "I né <toolso"
    (only_calls,) = whole(CALL, num_logprobs=0)["choices"]
    assert only_calls["logprobs"] is None


def test_log_probabilities_of_reasoning_are_not_kept_until_text_comes() -> None:
    formatter = chat_formatter(num_logprobs=0)
    for delta in tokens(f"<think>{'hm ' * 1000}", cuts=range(1, 3000)):
        formatter.collect(delta)
    (choice,) = formatter.reader._choices
    assert len(choice._placed) + len(choice._of_text) < 10


def test_each_choice_is_read_by_itself() -> None:
    texts = (f"{THOUGHT}yes", CALL)
    raw = [text.encode() for text in texts]
    answer = chat_formatter(num_choices=2)
    chunks = [*answer.opening()]
    at = [0, 0]
    cursor = START
    step = 7
    while any(at[i] < len(raw[i]) for i in range(2)):
        segments, token_ids, output = [], (), ""
        for i in range(2):
            piece = raw[i][at[i] : at[i] + step]
            if not piece:
                continue
            at[i] += len(piece)
            # A character that is cut in two is held back by the worker; here it is not cut.
            piece_text = piece.decode(errors="ignore")
            missing = len(piece) - len(piece_text.encode())
            at[i] -= missing
            piece = piece[: len(piece) - missing]
            done = at[i] == len(raw[i])
            reason = FinishReason.STOP if done else None
            segments.append(Segment(i, len(piece), len(piece), reason))
            token_ids += tuple(piece)
            output += piece_text
        end = Cursor(cursor.num_tokens + len(token_ids), cursor.num_bytes + len(output.encode()))
        chunks += answer.delta(Delta(cursor, end, token_ids, output, None, tuple(segments)))
        cursor = end
    chunks += answer.finished(Finished(cursor, FinishReason.STOP, Usage(3, cursor.num_tokens)))
    first, second = put_together(chunks, 0), put_together(chunks, 1)
    assert first["message"]["reasoning_content"] == "hm é"
    assert (first["message"]["content"], first["finish_reason"]) == ("yes", "stop")
    assert second["finish_reason"] == "tool_calls"
    assert second["message"]["tool_calls"][0]["function"] == {
        "name": "f",
        "arguments": '{"a": "é"}',
    }


@st.composite
def turns(draw: st.DrawFn) -> tuple[str, list[int]]:
    parts = st.sampled_from([CALL, THOUGHT, "text", " ", "\n", "é", "<tool_call>", "{", "</think>"])
    text = "".join(draw(st.lists(parts, min_size=1, max_size=6)))
    cuts = draw(st.lists(st.integers(0, len(text.encode())), max_size=12))
    return text, cuts


@settings(max_examples=examples(60), deadline=None)
@given(turn=turns())
def test_a_stream_put_together_is_the_whole_answer(turn: tuple[str, list[int]]) -> None:
    text, cuts = turn
    answer = whole(text, num_logprobs=0)
    (wanted,) = answer["choices"]
    chunks = streamed(tokens(text, cuts), num_logprobs=0, include_usage=True)
    result = put_together(chunks)
    message = dict(wanted["message"])
    del message["refusal"]
    message["content"] = message["content"] or ""  # a stream begins before it is known
    assert result["message"] == message
    assert result["finish_reason"] == wanted["finish_reason"]
    assert result["logprobs"] == (wanted["logprobs"] or {"content": []})["content"]
    assert chunks[-1]["usage"] == answer["usage"]


def test_a_choice_s_last_entries_are_kept_when_its_text_was_held_back_until_its_end() -> None:
    """Of several choices each ends with a delta of its own, before the parser knows."""
    text = "so <tool"  # the marker's beginning is text after all
    token_ids = tuple(text.encode())
    end = Cursor(len(token_ids), len(token_ids))
    delta = Delta(
        START,
        end,
        token_ids,
        text,
        tuple(TokenLogprob(token, -0.5) for token in token_ids),
        (
            Segment(0, len(token_ids), len(token_ids), FinishReason.LENGTH),
            Segment(1, 0, 0, FinishReason.LENGTH),
        ),
    )
    answer = chat_formatter(num_choices=2, num_logprobs=0)
    answer.collect(delta)
    first, _ = as_sent(answer.whole(Finished(end, FinishReason.LENGTH, Usage(3, 8))))["choices"]
    assert first["message"]["content"] == text
    assert "".join(entry["token"] for entry in first["logprobs"]["content"]) == text

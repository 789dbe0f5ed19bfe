"""Logs of responses for unit tests: a model's output, gathered into entries in any way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from api.dialects.responses.formatter import ResponseFormatter
from api.dialects.responses.record import StoredRequest
from api.output_parsers.parser import ParserConfig, Thinking
from shared.messages import (
    START,
    Cursor,
    Delta,
    Failed,
    Finished,
    FinishReason,
    JobState,
    TokenLogprob,
    Usage,
)
from shared.text.model_card import ModelCard
from shared.text.tool_formats import ReasoningFormat, ToolFormat
from tests.unit.api.dialects.as_sent import as_sent
from tests.unit.api.dialects.letter_tokenizer import LetterTokenizer

EMOJI = "😀".encode()
PIECES = [
    b"<end>",
    *(b"a", b"b", b" ", b"\n", "é".encode(), b"END", b"<", b"words "),
    *(bytes([byte]) for byte in EMOJI),
    *(b"<think>", b"</think>", b"<tool_call>", b"</tool_call>"),
    *(b'{"name": "get", "arguments": ', b'{"x": 1', b"}", b"}}"),
]
TOKENIZER = LetterTokenizer(PIECES)
JOB_ID = "0-0198c0de-0000-7000-8000-000000000001"
CARD = ModelCard(
    name="m",
    created_s=1,
    max_model_len=64,
    vocab_size=len(PIECES),
    eos_token_ids=(0,),
    has_chat_template=True,
    tokenizer_digest="t",
    facts_digest="f",
)


def tokens(*pieces: str) -> tuple[int, ...]:
    """Ids of pieces by their text; an emoji is its four bytes."""
    ids: list[int] = []
    for piece in pieces:
        known = piece.encode()
        if known == EMOJI:
            ids += [PIECES.index(bytes([byte])) for byte in EMOJI]
        else:
            ids.append(PIECES.index(known))
    return tuple(ids)


def stored_request(**changes: Any) -> StoredRequest:
    fields: dict[str, Any] = {
        "created_s": 7,
        "card": CARD,
        "parser": PLAIN,
        "input": [],
        "tools": [],
        "tool_choice": "auto",
        "text_format": {"type": "text"},
        "temperature": 1.0,
        "top_p": 1.0,
        "background": False,
        "store": True,
        "parallel_tool_calls": True,
    }
    return StoredRequest(**(fields | changes))


PLAIN = ParserConfig()
TURNS = ParserConfig(  # reasoning, then text and calls of the tool `get`
    tool_format=ToolFormat.HERMES,
    names=("get",),
    reasoning_format=ReasoningFormat.THINK,
    thinking=Thinking.MAYBE,
)


def response_formatter(parser: ParserConfig = PLAIN, **changes: Any) -> ResponseFormatter:
    return ResponseFormatter(stored_request(parser=parser, **changes), JOB_ID, TOKENIZER)


def log_of(
    token_ids: Sequence[int],
    sizes: Sequence[int] = (),
    held: Sequence[int] = (),
    *,
    shown: int | None = None,
    logprobs: bool = False,
) -> Iterator[Delta]:
    """The tokens in entries of these sizes, one each behind them.

    `held`: characters that each entry holds back of the text that is known by then. `shown`: the
    characters that a stop string left of the text.
    """
    detokenizer = TOKENIZER.detokenizer()
    known, released, start, at, entry = "", 0, START, 0, 0
    while at < len(token_ids):
        size = sizes[entry] if entry < len(sizes) else 1
        fresh = tuple(token_ids[at : at + size])
        at += size
        known += detokenizer.push(fresh)
        is_last = at >= len(token_ids)
        if is_last:
            known += detokenizer.flush()
        limit = len(known) if shown is None else min(shown, len(known))
        holds = held[entry] if entry < len(held) and not is_last else 0
        upto = max(released, limit - holds)
        text, released = known[released:upto], upto
        end = Cursor(start.num_tokens + len(fresh), start.num_bytes + len(text.encode()))
        yield Delta(start, end, fresh, text, _logprobs(fresh) if logprobs else None)
        start, entry = end, entry + 1


def _logprobs(token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -0.5, ((token, -0.5), (1, -math.inf))) for token in token_ids)


def finished(log: Sequence[Delta], reason: FinishReason = FinishReason.STOP) -> Finished:
    end = log[-1].end if log else START
    return Finished(end, reason, Usage(3, end.num_tokens, 1))


def failed(log: Sequence[Delta], state: JobState = JobState.FAILED, code: str = "poison") -> Failed:
    end = log[-1].end if log else START
    return Failed(end, state, code, "It went wrong.", Usage(3, end.num_tokens))


def result(made: ResponseFormatter, log: Sequence[Delta], end: Finished | Failed) -> list[Any]:
    """All events, from first to last."""
    events = [*made.opening()]
    for delta in log:
        events += made.delta(delta)
    last = made.finished(end) if isinstance(end, Finished) else made.job_failed(end, delivered=True)
    return list(as_sent([*events, *last]))

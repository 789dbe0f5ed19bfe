"""Answers whose frontend cuts them at any write, and the streams that go on behind them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from api.jobs.reader_position import ReaderPosition, ResumePoint
from api.jobs.tail import tail_response
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
from tests.unit.api.dialects.response_logs import TOKENIZER, tokens
from tests.unit.api.dialects.test_sliced_answers import (
    LogStream,
    frontend_with,
    record_with,
    sent_by,
)

Events = Sequence[Delta | Finished]
TURN = tokens(
    *("<think>", "a", "b", " ", "</think>", "\n", "words ", "<", "a", "😀", " ", "\n"),
    *("<tool_call>", '{"name": "get", "arguments": ', '{"x": 1', "}", "}", "</tool_call>"),
    *("é", "<", "END", "<tool_call>", "words ", "<tool_call>", '{"name": "get", "arguments": '),
    *('{"x": 1', "}}", "</tool_call>", "words ", "words ", "a", " ", "😀", "b", "é", "\n"),
)


class TrimmedStream(LogStream):
    """A log read from a cursor on, as a JobStream gives it."""

    def __init__(self, events: Events, after: Cursor = START) -> None:
        super().__init__(events)
        self._delivered = ReaderPosition(after)

    async def get(self, timeout_s: float) -> Delta | Finished:
        while isinstance(event := await super().get(timeout_s), Delta):
            fresh = self._delivered.take(event)
            if fresh is not None:
                return fresh
        return event


def frontend_over(events: Events) -> Any:
    frontend = frontend_with(events)

    async def opened(job_id: str, after: Cursor, *_: Any, **__: Any) -> TrimmedStream:
        return TrimmedStream(events, after)

    frontend.relay.open = opened
    return frontend


async def tail_of(events: Events, num_choices: int, after: ResumePoint) -> bytes:
    """The bytes of the job's stream from a resume point on."""
    frontend = frontend_over(events)
    response = tail_response(frontend, record_with(num_choices), after)
    return b"".join(message["body"] for message in (await sent_by(response))[1:])


def log_of_choices(
    num_choices: int, seed: int, *, long_entry: int = 0, eos: bool = True
) -> list[Delta | Finished]:
    """Choices that say TURN, each from another token on, a token a step, in a random order and in
    entries of a few steps; one entry has `long_entry` steps. The end is one that is written in
    pieces."""
    chance = random.Random(seed)
    left = {choice: [*TURN[choice:], *((0,) if eos else ())] for choice in range(num_choices)}
    if long_entry:
        for token_ids in left.values():
            token_ids[:0] = tokens("a", "b") * (long_entry // num_choices)
    detokenizers = [TOKENIZER.detokenizer() for _ in left]
    steps: list[tuple[Segment, tuple[int, ...], str]] = []
    while left:
        choice = chance.choice(sorted(left))
        token_id = left[choice].pop(0)
        text = detokenizers[choice].push((token_id,))
        end = None if left[choice] or num_choices == 1 else FinishReason.STOP
        has_point = end is not None and choice % 2 == 1  # an end of its own, behind its last token
        num_bytes = len(text.encode())
        step = Segment(choice, 1, num_bytes, None if has_point else end)
        steps.append((step, (token_id,), text))
        if has_point:
            steps.append((Segment(choice, 0, 0, end), (), ""))
        if not left[choice]:
            del left[choice]
    log: list[Delta | Finished] = []
    cursor = START
    while steps:
        size = long_entry if long_entry and len(log) == 2 else chance.randint(1, 6)
        entry, steps = steps[:size], steps[size:]
        token_ids = tuple(token_id for _, step_ids, _ in entry for token_id in step_ids)
        text = "".join(text for _, _, text in entry)
        start = cursor
        cursor = Cursor(start.num_tokens + len(token_ids), start.num_bytes + len(text.encode()))
        logprobs = tuple(TokenLogprob(token_id, -0.5) for token_id in token_ids)
        segments = tuple(segment for segment, _, _ in entry)
        log.append(Delta(start, cursor, token_ids, text, logprobs, segments))
    return [*log, Finished(cursor, FinishReason.STOP, Usage(100_000, cursor.num_tokens))]

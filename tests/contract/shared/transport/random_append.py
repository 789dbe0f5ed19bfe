"""Appends as a worker makes them, and as none should."""

from __future__ import annotations

import random

from shared.messages import Cursor, FinishReason, JobState, Segment, TokenLogprob, Usage
from shared.transport.ports.queue import Append, JobEnd
from tests.support.jobs import Stream

TEXTS = ("", "a", "é", "|", "a|b", "\n", "€😀", "x" * 40)
FAR = 7
FLAWS = ("chain", "attempt", "gap", "bytes", "count", "segments")
FLAWLESS = 12  # times as often as each flaw


def random_append(rng: random.Random, stream: Stream) -> Append:
    """Mostly what the log expects next; sometimes what it must refuse."""
    token_ids = [rng.randrange(1000) for _ in range(rng.choice((0, 1, 1, 1, 2, 5)))]
    end = _random_end(rng) if not token_ids or rng.random() < 0.2 else None
    logprobs = None
    if rng.random() < 0.3:
        top = ((1, -0.5), (2, float("-inf")))
        logprobs = tuple(TokenLogprob(token, -1.25, top) for token in token_ids)
    cached = rng.choice((None, 0, 3))
    text = rng.choice(TEXTS)
    segments = _random_segments(rng, len(token_ids), text) if stream.num_choices > 1 else None
    item = stream.append(token_ids, text, end, logprobs, segments, cached_tokens=cached)
    return _flawed(item, rng.choice(("",) * FLAWLESS + FLAWS), rng)


def _flawed(item: Append, flaw: str, rng: random.Random) -> Append:
    delta = item.delta
    (start_tokens, start_bytes), (end_tokens, end_bytes) = delta.start, delta.end
    match flaw:
        case "chain":
            return item._replace(start_hash="0" * 16, end_hash="1" * 16)
        case "attempt":
            return item._replace(attempt=item.attempt + rng.choice((-1, 1)))
        case "gap":
            start = Cursor(start_tokens + FAR, start_bytes + FAR)
            delta = delta._replace(start=start, end=Cursor(end_tokens + FAR, end_bytes + FAR))
        case "bytes":
            delta = delta._replace(end=Cursor(end_tokens, end_bytes + 1))
        case "count":
            delta = delta._replace(end=Cursor(end_tokens + 1, end_bytes))
        case "segments":
            delta = delta._replace(segments=(Segment(1, len(delta.token_ids) + 1, 0),))
    return item._replace(delta=delta)


def _random_segments(rng: random.Random, num_tokens: int, text: str) -> tuple[Segment, ...]:
    """The item's tokens and text in one or two runs, each within its characters."""
    num_first, num_chars = rng.randint(0, num_tokens), rng.randint(0, len(text))
    num_bytes, all_bytes = len(text[:num_chars].encode()), len(text.encode())
    first = Segment(rng.randrange(2), num_first, num_bytes)
    stop = rng.choice((None, 17, "a|b", "é"))
    reason = rng.choice((None, None, FinishReason.STOP))
    rest = Segment(
        1 - first.choice,
        num_tokens - num_first,
        all_bytes - num_bytes,
        reason,
        stop if reason else None,
    )
    return (first, rest)


def _random_end(rng: random.Random) -> JobEnd:
    usage = Usage(3, 0, rng.randrange(3))
    if rng.random() < 0.3:
        return JobEnd(JobState.FAILED, "engine_error", usage, None, "a|b é")
    return JobEnd(JobState.FINISHED, FinishReason.STOP, usage, rng.choice((None, 17, "a|b", "é")))

"""The outputs of a step: new tokens of sequences, and their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as View
from functools import partial
from itertools import repeat

from shared.messages import ErrorCode, FinishReason, TokenLogprob
from worker.engine.request import EngineOutput, RequestTimes
from worker.engine.sequence import Sequence
from worker.engine.stop import StopMatch

# An EngineOutput from all its members in order, without a call in Python for each.
_new_output: Callable[[tuple[object, ...]], EngineOutput] = partial(tuple.__new__, EngineOutput)


def grown_output(
    sequence: Sequence,
    logprobs: Mapping[int, TokenLogprob],
    stop: StopMatch | None = None,
    times: RequestTimes | None = None,
) -> EngineOutput:
    """Returns the output of a step that gave the sequence its newest token."""
    return _new_output(
        (
            sequence.request_id,
            (sequence.token_ids[-1],),
            None if sequence.params.logprobs is None else (logprobs[sequence.seq_id],),
            stop.reason if stop is not None else None,
            stop.token_id if stop is not None else None,
            None,
            "",
            sequence.num_cached_tokens,
            (),
            times,
            (),
        )
    )


def plain_outputs(
    request_ids: View[str], token_ids: View[int], num_cached_tokens: View[int]
) -> Iterator[EngineOutput]:
    """Yields an output for each request: of one token, without anything else about it."""
    none, message, empty = repeat(None), repeat(""), repeat(())
    members = zip(
        request_ids,
        zip(token_ids, strict=True),
        none,
        none,
        none,
        none,
        message,
        num_cached_tokens,
        empty,
        none,
        empty,
        strict=False,  # the repeated ones have no end
    )
    return map(_new_output, members)


def stopped_output(
    sequence: Sequence, stop: StopMatch, times: RequestTimes | None = None
) -> EngineOutput:
    """Returns the output of an end without a new token."""
    wants_logprobs = sequence.params.logprobs is not None
    return EngineOutput(
        sequence.request_id,
        (),
        logprobs=() if wants_logprobs else None,
        finish_reason=stop.reason,
        stop_reason=stop.token_id,
        num_cached_tokens=sequence.num_cached_tokens,
        times=times,
    )


def failed_output(sequence: Sequence, code: ErrorCode, message: str) -> EngineOutput:
    """Returns the output of an end by a failure."""
    return EngineOutput(
        sequence.request_id,
        (),
        finish_reason=FinishReason.ERROR,
        error=code,
        message=message,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def times_of(sequence: Sequence, now_s: float) -> RequestTimes:
    """Returns the times of a sequence that was computed, up to now."""
    assert sequence.begun_s is not None, "it was computed"
    first_s = now_s if sequence.first_token_s is None else sequence.first_token_s
    return RequestTimes(
        sequence.begun_s - sequence.arrived_s, first_s - sequence.begun_s, now_s - first_s
    )

"""Appends as lua/append.lua takes them: the arguments of one item, and the verdict on it."""

from __future__ import annotations

from shared.messages import Cursor, JobState
from shared.transport.ports.queue import Append, AppendResult, AppendStatus, JobEnd
from shared.transport.scripts import Argument
from shared.transport.wire import (
    encode_logprobs,
    encode_segments,
    encode_stop_reason,
    encode_token_ids,
)

# The script reads the arguments of every item in this order; names and values follow.
APPEND_FIELDS = (
    "id", "attempt", "n0", "b0", "h0", "n1", "b1", "h1", "tokens", "text", "num_more",
)  # fmt: skip
NUM_FIXED = len(APPEND_FIELDS)
MAX_MESSAGE_CHARS = 1000

_PLAIN = {"ok": AppendStatus.OK, "fenced": AppendStatus.FENCED, "gone": AppendStatus.GONE}
_WITH_CURSOR = {"gap": AppendStatus.GAP, "diverged": AppendStatus.DIVERGED}


def append_arguments(item: Append) -> list[Argument]:
    """Returns the item as arguments of lua/append.lua: NUM_FIXED in APPEND_FIELDS' order, then the
    names and values of what few items have."""
    delta = item.delta
    (n0, b0), (n1, b1) = delta.start, delta.end
    text, tokens = delta.text.encode(), encode_token_ids(delta.token_ids)
    arguments: list[Argument] = [
        *(item.job_id, item.attempt, n0, b0, item.start_hash, n1, b1, item.end_hash),
        *(tokens, text, 0),
    ]
    if delta.segments is not None:
        arguments += ("c", encode_segments(delta.segments))
    if delta.logprobs is not None:
        arguments += ("lp", encode_logprobs(delta.logprobs))
    if item.end_of_job is not None:
        arguments += _of_end(item.end_of_job)
    elif item.cached_tokens is not None:
        arguments += ("cached", item.cached_tokens)
    if item.num_lane_preemptions:
        arguments += ("preemptions", item.num_lane_preemptions)
    if item.prompt_slice is not None:
        arguments += ("slice", item.prompt_slice.index, "scores", item.prompt_slice.entries)
    elif item.num_prompt_slices and _follows_prompt(item.end_of_job):
        arguments += ("slice", item.num_prompt_slices)
    arguments[NUM_FIXED - 1] = len(arguments) - NUM_FIXED
    return arguments


def _of_end(end: JobEnd) -> tuple[Argument, ...]:
    tail = f"{encode_stop_reason(end.stop_reason)}|{end.message[:MAX_MESSAGE_CHARS]}"
    state, reason = str(end.state), str(end.reason)
    cached = end.usage.cached_tokens
    return ("cached", cached, "state", state, "reason", reason, "tail", tail)


def _follows_prompt(end: JobEnd | None) -> bool:
    """Returns whether the prompt's log probabilities must be there: not for a failure."""
    return end is None or end.state is JobState.FINISHED


def append_result(item: Append, verdict: str) -> AppendResult:
    """Decodes the script's verdict on `item`."""
    if verdict == "ok":
        num_tokens, num_bytes = item.delta.end
        return AppendResult(AppendStatus.OK, num_tokens, num_bytes=num_bytes)
    kind, _, detail = verdict.partition(":")
    if kind in _PLAIN:
        return AppendResult(_PLAIN[kind])
    if kind in _WITH_CURSOR:
        at = Cursor.parse(detail)
        return AppendResult(_WITH_CURSOR[kind], at.num_tokens, detail, at.num_bytes)
    if kind == "ended":
        return AppendResult(AppendStatus.ENDED, detail=detail)
    return AppendResult(AppendStatus.REJECTED, detail=detail or verdict)

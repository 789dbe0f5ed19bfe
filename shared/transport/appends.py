"""Appends as lua/append.lua takes them: the arguments of one item, and the verdict on it."""

from __future__ import annotations

from shared.messages import JobState
from shared.transport.ports.queue import Append, AppendResult, AppendStatus
from shared.transport.wire import (
    encode_logprobs,
    encode_segments,
    encode_stop_reason,
    encode_token_ids,
)

# The order in which the script reads the arguments of an item.
APPEND_FIELDS = (
    "id", "attempt", "n0", "b0", "h0", "n1", "b1", "h1", "tokens", "logprobs", "segments", "text",
    "cached", "state", "reason", "tail", "slice", "scores",
)  # fmt: skip
APPEND_STRIDE = len(APPEND_FIELDS)
MAX_MESSAGE_CHARS = 1000

_PLAIN = {"ok": AppendStatus.OK, "fenced": AppendStatus.FENCED, "gone": AppendStatus.GONE}
_WITH_CURSOR = {"gap": AppendStatus.GAP, "diverged": AppendStatus.DIVERGED}


def append_arguments(item: Append) -> tuple[str | bytes | int, ...]:
    """Returns the item as APPEND_STRIDE arguments of lua/append.lua, in APPEND_FIELDS' order."""
    delta, end, prompt = item.delta, item.end_of_job, item.prompt_slice
    num_slices = item.num_prompt_slices if end is None or end.state is JobState.FINISHED else 0
    cached = item.cached_tokens
    state = reason = tail = ""
    if end is not None:
        cached = end.usage.cached_tokens
        state, reason = str(end.state), str(end.reason)
        tail = f"{encode_stop_reason(end.stop_reason)}|{end.message[:MAX_MESSAGE_CHARS]}"
    return (
        item.job_id,
        item.attempt,
        delta.start.num_tokens,
        delta.start.num_bytes,
        item.start_hash,
        delta.end.num_tokens,
        delta.end.num_bytes,
        item.end_hash,
        encode_token_ids(delta.token_ids),
        encode_logprobs(delta.logprobs),
        encode_segments(delta.segments),
        delta.text.encode(),
        "" if cached is None else cached,
        state,
        reason,
        tail,
        (num_slices or "") if prompt is None else prompt.index,
        b"" if prompt is None else prompt.entries,
    )


def append_result(item: Append, verdict: str) -> AppendResult:
    """Returns what the transition's verdict on `item` means."""
    kind, _, detail = verdict.partition(":")
    if kind == "ok":
        return AppendResult(
            AppendStatus.OK, item.delta.end.num_tokens, num_bytes=item.delta.end.num_bytes
        )
    if kind in _PLAIN:
        return AppendResult(_PLAIN[kind])
    if kind in _WITH_CURSOR:
        num_tokens, _, num_bytes = detail.partition("-")
        return AppendResult(_WITH_CURSOR[kind], int(num_tokens), detail, int(num_bytes))
    if kind == "ended":
        return AppendResult(AppendStatus.ENDED, detail=detail)
    return AppendResult(AppendStatus.REJECTED, detail=detail or verdict)

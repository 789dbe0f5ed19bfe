"""One item of an append: its arguments for the transition, its verdict read back."""

from __future__ import annotations

from shared.messages import START, Delta, FinishReason, JobState
from shared.redis.scripts import Argument
from shared.transport.ports.jobs import Append, AppendResult, AppendStatus
from shared.transport.wire import (
    encode_logprobs,
    encode_segments,
    encode_stop_reason,
    encode_token_ids,
    sums_of,
)

MAX_MESSAGE_CHARS = 1000

_PLAIN = {
    "ok": AppendStatus.OK,
    "fenced": AppendStatus.FENCED,
    "gone": AppendStatus.GONE,
}
_WITH_CURSOR = {"gap": AppendStatus.GAP, "diverged": AppendStatus.DIVERGED}


def refusal_of(item: Append) -> AppendResult | None:
    """REJECTED for an item that the log could not hold or a reader not read; else None."""
    delta, end = item.delta, item.end_of_job
    num_tokens = delta.end.num_tokens - delta.start.num_tokens
    if item.prompt_slice is not None and (delta.end != START or end is not None):
        return _rejected("a slice of the prompt comes alone and first")
    if num_tokens != len(delta.token_ids):
        return _rejected("token_ids do not fill the range")
    if delta.logprobs is not None and len(delta.logprobs) != num_tokens:
        return _rejected("logprobs do not fill the range")
    try:
        num_bytes = len(delta.text.encode())
        encode_segments(delta.segments).encode()
        if end is not None:
            end.message.encode()
            encode_stop_reason(end.stop_reason).encode()
    except UnicodeEncodeError:
        return _rejected("text is not well-formed")
    if num_bytes != delta.end.num_bytes - delta.start.num_bytes:
        return _rejected("text does not fill the range")
    if (why := _fault_of_segments(delta)) is not None:
        return _rejected(why)
    if end is None:
        return None
    if end.state is JobState.FINISHED:
        if end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return _rejected("a finished job has the reason stop or length")
    elif end.state is not JobState.FAILED:
        return _rejected("a worker ends a job as finished or failed")
    elif not end.reason or "|" in end.reason:
        return _rejected("a failed job has an error code")
    return None


def append_arguments(item: Append) -> tuple[Argument, ...]:
    """The 18 arguments of lua/append.lua's items."""
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


def _fault_of_segments(delta: Delta) -> str | None:
    if delta.segments is None:
        return None
    if any(min(segment[:3]) < 0 for segment in delta.segments):
        return "a segment has negative numbers"
    if any(
        segment.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH)
        for segment in delta.segments
    ):
        return "a choice ends by stop or length"
    num_tokens = delta.end.num_tokens - delta.start.num_tokens
    num_bytes = delta.end.num_bytes - delta.start.num_bytes
    if sums_of(delta.segments) != (num_tokens, num_bytes):
        return "segments do not fill the range"
    return None


def _rejected(detail: str) -> AppendResult:
    return AppendResult(AppendStatus.REJECTED, detail=detail)

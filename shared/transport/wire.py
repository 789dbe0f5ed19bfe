"""Log entries and live frames: the two forms of events on the wire.

A log entry's id is its cursor, `<tokens>-<utf8 bytes>`, both cumulative; the last entry has
`k=end` and the id `<tokens + 1>-0`, slices of the prompt, which come first, have `k=prompt` and the
id `0-<slice + 1>`. A frame is one pub/sub message, fields joined by '|' with the one free text
last. Entry kinds and fields that this release does not know are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import xxhash

from shared.messages import (
    Cursor,
    Delta,
    Durability,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Job,
    JobEvent,
    JobState,
    PromptSlice,
    Segment,
    Started,
    TokenLogprob,
    Usage,
)

LOST_OUTPUT = "The output of this job was lost."

_NULL = b"null"  # how minus infinity is written
_logprobs_decoder = msgspec.json.Decoder(tuple[TokenLogprob, ...])
_nullable_decoder = msgspec.json.Decoder(
    tuple[tuple[int, float | None, tuple[tuple[int, float | None], ...]], ...]
)


def encode_token_ids(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def decode_token_ids(text: bytes) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def encode_logprobs(logprobs: Sequence[TokenLogprob] | None) -> bytes:
    """Returns JSON of numbers only (no '|'), minus infinity as null; b'' for None."""
    if logprobs is None:
        return b""
    return msgspec.json.encode([(entry.token_id, entry.logprob, entry.top) for entry in logprobs])


def decode_logprobs(text: bytes) -> tuple[TokenLogprob, ...] | None:
    """Decodes log probabilities. Raises ValueError for anything but a list of entries."""
    if not text:
        return None
    if _NULL not in text:
        return _logprobs_decoder.decode(text)
    return tuple(
        TokenLogprob(
            token_id, _number(logprob), tuple((other, _number(value)) for other, value in top)
        )
        for token_id, logprob, top in _nullable_decoder.decode(text)
    )


def _number(logprob: float | None) -> float:
    return -math.inf if logprob is None else logprob


def encode_stop_reason(stop_reason: str | int | None) -> str:
    """Returns JSON without '|' (escaped inside strings); '' for None."""
    if stop_reason is None:
        return ""
    return json.dumps(stop_reason, ensure_ascii=False).replace("|", "\\u007c")


def decode_stop_reason(text: bytes) -> str | int | None:
    if not text:
        return None
    value = json.loads(text)
    if not isinstance(value, str | int):
        raise ValueError("a stop reason is a string or a number")
    return value


def decode_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> JobEvent | None:
    """Returns the event of a log entry; None for a kind of entry from a newer release.

    Raises ValueError for malformed input.
    """
    kind = fields.get(b"k")
    if kind == b"end":
        return build_end(
            state=fields[b"state"].decode(),
            reason=fields[b"reason"].decode(),
            end=Cursor(int(fields[b"n"]), int(fields[b"b"])),
            prompt_tokens=int(fields[b"prompt_tokens"]),
            cached_tokens=int(fields[b"cached_tokens"]),
            stop_reason=decode_stop_reason(fields.get(b"stop_reason", b"")),
            message=fields.get(b"message", b"").decode(),
            ended_ms=_time(fields.get(b"end_ms", b"")),
        )
    if kind == b"prompt":
        return PromptSlice(Cursor.parse(entry_id.decode()).num_bytes - 1, fields[b"lp"])
    if kind is not None:
        return None
    end = Cursor.parse(entry_id.decode())
    token_ids = decode_token_ids(fields[b"t"])
    text = fields[b"d"]
    start = Cursor(end.num_tokens - len(token_ids), end.num_bytes - len(text))
    return Delta(
        start,
        end,
        token_ids,
        text.decode(),
        decode_logprobs(fields.get(b"lp", b"")),
        decode_segments(fields.get(b"c", b"")),
    )


def decode_frame(data: bytes) -> JobEvent | None:
    """Returns the event of a live frame; None for a newer release's kind. Raises ValueError."""
    if data[:2] == b"D|":  # nearly all
        _, n0, n1, b1, token_ids, logprobs, text = data.split(b"|", 6)
        return _delta(n0, n1, b1, b"", token_ids, logprobs, text)
    kind, _, rest = data.partition(b"|")
    if kind == b"C":
        n0, n1, b1, segments, token_ids, logprobs, text = rest.split(b"|", 6)
        return _delta(n0, n1, b1, segments, token_ids, logprobs, text)
    if kind == b"S":
        attempt, worker_id = rest.split(b"|", 1)
        return Started(worker_id.decode(), int(attempt))
    if kind == b"E":
        n, state, reason, b, prompt, cached, stop_reason, last = rest.split(b"|", 7)
        return build_end(
            state=state.decode(),
            reason=reason.decode(),
            end=Cursor(int(n), int(b)),
            prompt_tokens=int(prompt),
            cached_tokens=int(cached),
            stop_reason=decode_stop_reason(stop_reason),
            message=last.decode(),
            ended_ms=_time(last),
        )
    return None


def _time(text: bytes) -> int | None:
    """Returns a time in ms; None if an earlier release wrote none, and for a message."""
    return int(text) if text.isdigit() else None


def _delta(
    n0: bytes,
    n1: bytes,
    b1: bytes,
    segments: bytes,
    token_ids: bytes,
    logprobs: bytes,
    text: bytes,
) -> Delta:
    num_bytes = int(b1)
    return Delta(
        Cursor(int(n0), num_bytes - len(text)),
        Cursor(int(n1), num_bytes),
        decode_token_ids(token_ids),
        text.decode(),
        decode_logprobs(logprobs) if logprobs else None,
        decode_segments(segments) if segments else None,
    )


def build_end(
    *,
    state: str,
    reason: str,
    end: Cursor,
    prompt_tokens: int,
    cached_tokens: int,
    stop_reason: str | int | None,
    message: str,
    ended_ms: int | None = None,
) -> Finished | Failed:
    """Returns the terminal event that a hash, an end entry or an E frame describes."""
    usage = Usage(prompt_tokens, end.num_tokens, cached_tokens)
    job_state = JobState(state)
    if job_state is JobState.FINISHED:
        return Finished(end, FinishReason(reason), usage, stop_reason, ended_ms)
    return Failed(end, job_state, reason, message, usage)


def lost_output(end: Finished | Failed) -> Failed:
    """Returns the end for a reader of an ended job whose log was lost."""
    return Failed(end.end, JobState.FAILED, ErrorCode.JOB_LOST, LOST_OUTPUT, end.usage)


def expired_output(end: Cursor, message: str, usage: Usage | None = None) -> Failed:
    """Returns the end for a reader of an ended job whose log has expired."""
    usage = usage or Usage(0, end.num_tokens)
    return Failed(end, JobState.FAILED, ErrorCode.JOB_EXPIRED, message, usage)


# Segments on the wire: the pieces of a delta, and which choice of its job each belongs to.
#
# JSON without '|': `[[choice, tokens, bytes, finish reason, stop reason], ...]`, without trailing
# Nones; '' for a delta without segments (all of it is choice 0's).

_decoder = msgspec.json.Decoder(tuple[Segment, ...])


def encode_segments(segments: Sequence[Segment] | None) -> str:
    """Returns segments as described above; '' for None."""
    if segments is None:
        return ""
    rows = []
    for segment in segments:
        choice, num_tokens, num_bytes, finish_reason, stop_reason = segment
        if finish_reason is not None or stop_reason is not None:
            break
        rows.append(f"[{choice},{num_tokens},{num_bytes}]")
    else:
        return f"[{','.join(rows)}]"
    whole = [_without_tail(segment) for segment in segments]
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    return text.replace("|", "\\u007c")  # only ever inside a string


def decode_segments(text: bytes) -> tuple[Segment, ...] | None:
    """Decodes segments. Raises ValueError for anything but a list of segments."""
    return _decoder.decode(text) if text else None


def _without_tail(segment: Segment) -> tuple[object, ...]:
    if segment.stop_reason is not None:
        return segment
    return segment[:4] if segment.finish_reason is not None else segment[:3]


# The hash chain over output token ids: two chains are equal when the outputs are.


def chain_hash(previous: str, token_ids: Iterable[int]) -> str:
    """Returns the chain of a prefix, continued by `token_ids`; '' is the empty prefix's."""
    chain = previous
    for token_id in token_ids:
        chain = xxhash.xxh64_hexdigest(f"{chain}/{token_id}".encode("ascii"))
    return chain


# A job as the JSON text that is stored under `req:<id>`.
#
# Unknown members are ignored, so a newer frontend may add some; members that a reader must
# understand raise the schema version instead (see docs/WIRE.md).

SCHEMA_VERSION = 1

_job_decoder = msgspec.json.Decoder(Job)
_encoder = msgspec.json.Encoder()


class PayloadInvalid(ValueError):
    """A malformed stored request. `code` is the job's error code."""

    code = ErrorCode.PAYLOAD_INVALID


def encode_job(job: Job) -> bytes:
    """Encodes a job for the worker, without the fields that are stored separately."""
    if job.request_record or job.idempotency is not None or job.durability is not Durability.NONE:
        job = replace(job, request_record="", idempotency=None, durability=Durability.NONE)
    return _encoder.encode(job)


def decode_job(payload: bytes) -> Job:
    """Raises PayloadInvalid with a sentence for anything that is not a valid job."""
    try:
        return _job_decoder.decode(payload)
    except (ValueError, RecursionError) as error:  # msgspec's errors and ours are ValueErrors
        raise PayloadInvalid(f"The stored request is malformed: {error}") from error

"""Why an ended job, or its text, is no longer stored: as Redis has it, and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from shared.transport.ports.jobs import Expired

DELIVERED_MS = 60_000  # how long an older release kept a log that was read to its end

# What keeps it longer, by the word in Redis (lua/lib/retention.lua).
_RECORD = {
    "setting": "PENSTOCK_JOB_RETENTION_S keeps ended jobs longer.",
    "request": "It was kept for as long as its request asked by 'store' or 'expires_after' "
    "(PENSTOCK_RESPONSE_TTL_S: the default of stored responses).",
    "batch": "The rows of a batch are in its output file; their jobs are kept for a minute.",
    "brief": "It was accepted while Redis was nearly full and kept for a minute: a larger "
    "maxmemory keeps ended jobs longer.",
    "memory": "Redis was nearly full, and the oldest ended jobs are deleted first: a larger "
    "maxmemory keeps them longer.",
}
_TEXT = {
    **_RECORD,
    "setting": "PENSTOCK_TEXT_RETENTION_S keeps texts longer.",
    "request": "It was kept for as long as its request asked by 'store' or 'expires_after'.",
    "memory": "Redis was nearly full, and the oldest texts are deleted first: a larger maxmemory "
    "keeps them longer.",
}


def text_expiry(fields: Mapping[bytes, bytes], now_ms: int) -> str | None:
    """Returns the sentences of an ended job without a log; None: its time has not come, and the log
    was lost. `now_ms`: the server's time, by which keys expire."""
    until = fields.get(b"text_until_ms") or fields.get(b"until_ms")
    if until is None:  # of an older release
        ended_ms = int(fields.get(b"end_ms", b"0"))
        return "The text of this job has expired." if now_ms >= ended_ms + DELIVERED_MS else None
    if now_ms < int(until):
        return None
    why = fields.get(b"text_why", b"setting").decode()
    return f"The text of this job expired at {_time(int(until))}. {_TEXT.get(why, '')}".rstrip()


def decode_tombstone(text: bytes, now_ms: int) -> Expired | None:
    """Returns the notice of a tombstone; None before its time, and for one without
    sentences: of a job that was deleted, or of an older release. `now_ms`: as for `text_expiry`."""
    try:
        _ended, until, why, kind, tenant = text.decode().split("|", 4)
        until_ms = int(until)
    except ValueError:
        return None
    message = f"This job has ended, and expired at {_time(until_ms)}. {_RECORD.get(why, '')}"
    return Expired(tenant, kind, message.rstrip()) if until_ms <= now_ms else None


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Job ids: "<partition>-<uuid7>". Any process derives every key of a job from its id alone."""

from __future__ import annotations

import os
import re
import time
import uuid

_JOB_ID = re.compile(r"(0|[1-9][0-9]{0,3})-[0-9A-Za-z_-]{1,64}")


def new_job_id(partition: int = 0) -> str:
    """A fresh id. Ids made later sort later (to the millisecond) within a partition."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76  # version 7 (RFC 9562, section 5.7)
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant
    return f"{partition}-{uuid.UUID(int=value)}"


def partition_of(job_id: str) -> int:
    """Raises ValueError for what cannot be a job id."""
    match = _JOB_ID.fullmatch(job_id)
    if match is None:
        raise ValueError(f"not a job id: {job_id[:80]!r}")
    return int(match[1])

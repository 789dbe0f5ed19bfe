"""Ended jobs whose time has passed: their keys as Redis has them then."""

from __future__ import annotations

import time
from typing import Any

from api.ids import parse_job_id
from tests.support.running_service import RunningService

LONG_AGO_MS = 5000


def expire_text(service: RunningService, name: str) -> None:
    """The log and the prompt of an ended job expire; its record stays."""
    job_id, keys, redis = _parts(service, name)
    service.call(redis.delete(keys.log(job_id), keys.prompt(job_id)))
    service.call(redis.hset(keys.job(job_id), "text_until_ms", _past_ms()))


def expire_record(service: RunningService, name: str) -> None:
    """All of an ended job expires but its tombstone."""
    job_id, keys, redis = _parts(service, name)
    names = [keys.log(job_id), keys.prompt(job_id), keys.job(job_id), keys.request_record(job_id)]
    service.call(redis.delete(*names))
    tombstone = service.call(redis.get(keys.tombstone(job_id))).decode()
    ended, _, *more = tombstone.split("|")
    service.call(
        redis.set(keys.tombstone(job_id), "|".join([ended, str(_past_ms()), *more]), keepttl=True)
    )


def _parts(service: RunningService, name: str) -> tuple[str, Any, Any]:
    job_id = parse_job_id(name)
    assert job_id is not None
    return job_id, service.transport.keys, service.transport.connections.commands


def _past_ms() -> int:
    return time.time_ns() // 1_000_000 - LONG_AGO_MS

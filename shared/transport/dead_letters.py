"""DeadLetters over Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from shared.keys import Keys
from shared.messages import Job
from shared.transport.failures import translated
from shared.transport.ports.dead_letters import DeadLetter, Requeued
from shared.transport.record_parts import INDEX_MARK
from shared.transport.scripts import Scripts
from shared.transport.wire import decode_job

MAX_LISTED = 1000
PAGE = 200
_FIELDS = ("model", "tenant", "kind", "reason", "crashes", "n", "died_ms", "requeued_as")


class RedisDeadLetters:
    """Implements DeadLetters."""

    def __init__(self, keys: Keys, redis: Redis, scripts: Scripts) -> None:
        self._keys = keys
        self._redis = redis
        self._scripts = scripts

    async def list(self, tenant: str | None, limit: int) -> Sequence[DeadLetter]:
        limit = max(0, min(limit, MAX_LISTED))
        found: list[DeadLetter] = []
        before = "+"
        while len(found) < limit:
            with translated("dead letters"):
                rows: Any = await self._redis.xrevrange(
                    self._keys.dead_letters, before, "-", count=PAGE
                )
                pipe = self._redis.pipeline(transaction=False)
                for _, fields in rows:
                    pipe.hmget(self._keys.dead_letter(fields[b"id"].decode()), _FIELDS)
                hashes = await pipe.execute() if rows else []
            for (_, fields), values in zip(rows, hashes, strict=True):
                dead_letter = _dead_letter(fields[b"id"].decode(), values)
                if isinstance(dead_letter, DeadLetter) and tenant in (None, dead_letter.tenant):
                    found.append(dead_letter)
            if len(rows) < PAGE:
                break
            before = "(" + rows[-1][0].decode()
        return found[:limit]

    async def get(self, job_id: str) -> DeadLetter | Requeued | None:
        with translated("dead letter"):
            values: Any = await self._redis.hmget(self._keys.dead_letter(job_id), _FIELDS)
        return _dead_letter(job_id, values)

    async def request(self, job_id: str) -> Job | None:
        with translated("dead letter"):
            kept: Any = await self._redis.hmget(
                self._keys.dead_letter(job_id), ("request", "facts")
            )
        request, record = kept
        if not request:
            return None
        text = (record or b"").decode()
        if text.startswith(INDEX_MARK):  # a worker of an older release kept the index alone
            text = ""
        return replace(decode_job(request), request_record=text)

    async def drop(self, job_id: str) -> bool:
        with translated("dead letter"):
            return bool(await self._scripts.call(self._redis, "dead_letter_drop", job_id))


def _dead_letter(job_id: str, values: Sequence[bytes | None]) -> DeadLetter | Requeued | None:
    texts = [None if value is None else value.decode() for value in values]
    model, tenant, kind, reason, crashes, num_tokens, died_ms, requeued_as = texts
    if requeued_as is not None:
        return Requeued(tenant or "", requeued_as)
    if died_ms is None:
        return None
    return DeadLetter(
        job_id=job_id,
        model=model or "",
        tenant=tenant or "",
        kind=kind or "",
        reason=reason or "",
        crashes=int(crashes or 0),
        num_tokens=int(num_tokens or 0),
        died_ms=int(died_ms),
    )

"""FileIndex over Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.keys import Keys, is_id
from shared.transport.failures import is_out_of_memory, translated
from shared.transport.ports.admission import STORE_SCOPES, QueueFull
from shared.transport.ports.files import (
    FILE_PREFIX,
    FileInUse,
    FileLimits,
    FilePart,
    FileRecord,
    FilesFull,
    FileUsage,
    NewFile,
)
from shared.transport.scripts import Scripts
from shared.transport.submission import share_argument

LIST_PAGE = 200
MEMORY_RETRY_S = 5.0

Fields = dict[bytes, bytes]

_parts = msgspec.json.Decoder(tuple[FilePart, ...])
_encoder = msgspec.json.Encoder()


class RedisFileIndex:
    """Implements FileIndex. Safe for any number of tasks."""

    def __init__(self, keys: Keys, redis: Redis, scripts: Scripts) -> None:
        self._keys = keys
        self._redis = redis
        self._scripts = scripts

    async def put(self, file: NewFile, limits: FileLimits) -> FileRecord:
        with translated("file_put"):
            try:
                reply = await self._scripts.call(
                    self._redis,
                    "file_put",
                    file.file_id,
                    file.tenant,
                    file.purpose,
                    file.name,
                    file.num_bytes,
                    encode_parts(file.parts),
                    file.life_ms,
                    limits.max_files,
                    limits.max_bytes,
                    limits.max_tenant_files,
                    limits.max_tenant_bytes,
                    share_argument(limits.max_share_per_tenant),
                )
            except RedisError as error:
                if is_out_of_memory(error):
                    raise QueueFull("memory", MEMORY_RETRY_S) from error
                raise
        if reply[0] == b"FULL":
            scope = reply[1].decode()
            if scope in STORE_SCOPES:
                raise QueueFull(scope, MEMORY_RETRY_S)
            raise FilesFull(scope)
        return FileRecord(
            file_id=file.file_id,
            tenant=file.tenant,
            purpose=file.purpose,
            name=file.name,
            num_bytes=file.num_bytes,
            parts=file.parts,
            created_ms=int(reply[1]),
            expires_ms=int(reply[2]),
        )

    async def get(self, file_id: str, tenant: str) -> FileRecord | None:
        if not is_id(file_id, FILE_PREFIX):
            return None
        with translated("file_get"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(self._keys.file(file_id))
            (seconds, _), fields = await pipe.execute()
        if not fields:
            return None
        record = _record(file_id, fields)
        if record.tenant != tenant or record.expires_ms <= int(seconds) * 1000:
            return None
        return record

    async def list(
        self, tenant: str, after: str | None, limit: int, *, oldest_first: bool, purpose: str | None
    ) -> Sequence[FileRecord]:
        found: list[FileRecord] = []
        index = self._keys.files_of(tenant)
        async for file_id, fields in follow(
            self._redis, index, after, self._keys.file, oldest_first=oldest_first
        ):
            if len(found) >= limit:
                break
            record = _record(file_id, fields)
            if purpose is None or record.purpose == purpose:
                found.append(record)
        return found

    async def drop(self, file_id: str, tenant: str) -> bool:
        if not is_id(file_id, FILE_PREFIX):
            return False
        with translated("file_drop"):
            (outcome,) = await self._scripts.call(self._redis, "file_drop", file_id, tenant)
        if outcome == b"USED":
            raise FileInUse(file_id)
        return bool(outcome == b"OK")

    async def usage(self, tenant: str) -> FileUsage:
        with translated("file_usage"):
            pipe = self._redis.pipeline(transaction=False)
            pipe.zcard(self._keys.files)
            pipe.zcard(self._keys.files_of(tenant))
            pipe.hmget(self._keys.files_bytes, "total", f"of:{tenant}")
            num_files, tenant_files, (num_bytes, tenant_bytes) = await pipe.execute()
        return FileUsage(num_files, int(num_bytes or 0), tenant_files, int(tenant_bytes or 0))

    async def sweep(self, removed: Sequence[str], count: int) -> Sequence[str]:
        with translated("file_sweep"):
            names = await self._scripts.call(self._redis, "file_sweep", count, *removed)
        return [name.decode() for name in names]


async def follow(
    redis: Redis,
    index: str,
    after: str | None,
    key_of: Any,
    *,
    oldest_first: bool = False,
) -> AsyncIterator[tuple[str, Fields]]:
    """Yields the ids of a sorted set that follow `after`, with their hashes; skips those without.

    An `after` that is not in the set is followed by nothing.
    """
    at = 0
    if after is not None:
        with translated("list"):
            rank = redis.zrank if oldest_first else redis.zrevrank
            place: Any = await rank(index, after)
        if place is None:
            return
        at = int(place) + 1
    while True:
        with translated("list"):
            ids: Any = await redis.zrange(index, at, at + LIST_PAGE - 1, desc=not oldest_first)
            pipe = redis.pipeline(transaction=False)
            for name in ids:
                pipe.hgetall(key_of(name.decode()))
            hashes = await pipe.execute() if ids else []
        for name, fields in zip(ids, hashes, strict=True):
            if fields:
                yield name.decode(), fields
        if len(ids) < LIST_PAGE:
            return
        at += LIST_PAGE


def encode_parts(parts: Sequence[FilePart]) -> bytes:
    return _encoder.encode([tuple(part) for part in parts])


def decode_parts(encoded: bytes) -> tuple[FilePart, ...]:
    return _parts.decode(encoded) if encoded else ()


def _record(file_id: str, fields: Fields) -> FileRecord:
    return FileRecord(
        file_id=file_id,
        tenant=fields[b"tenant"].decode(),
        purpose=fields[b"purpose"].decode(),
        name=fields[b"name"].decode(),
        num_bytes=int(fields[b"bytes"]),
        parts=decode_parts(fields[b"parts"]),
        created_ms=int(fields[b"created_ms"]),
        expires_ms=int(fields[b"expires_ms"]),
    )

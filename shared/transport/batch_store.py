"""BatchStore over Redis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.keys import Keys, is_id
from shared.messages import Usage
from shared.transport.failures import is_out_of_memory, translated
from shared.transport.file_index import (
    MEMORY_RETRY_S,
    Fields,
    decode_parts,
    encode_parts,
    follow,
)
from shared.transport.ports.admission import STORE_SCOPES, QueueFull
from shared.transport.ports.batches import (
    BATCH_PREFIX,
    BatchClaim,
    BatchEnd,
    BatchError,
    BatchesFull,
    BatchLimits,
    BatchOpen,
    BatchProgress,
    BatchRecord,
    BatchStatus,
    LeaseLost,
    NewBatch,
    NoInput,
    Saved,
    output_file_id,
)
from shared.transport.ports.files import FILE_PREFIX, FilePart
from shared.transport.ports.jobs import TransportError
from shared.transport.scripts import Argument, Scripts
from shared.transport.submission import share_argument

_metadata = msgspec.json.Decoder(dict[str, str])
_errors = msgspec.json.Decoder(tuple[BatchError, ...])
_encoder = msgspec.json.Encoder()


class RedisBatchStore:
    """Implements BatchStore. Safe for any number of tasks."""

    def __init__(self, keys: Keys, redis: Redis, scripts: Scripts, num_partitions: int = 1) -> None:
        self._num_partitions = num_partitions
        self._keys = keys
        self._redis = redis
        self._scripts = scripts

    async def create(self, batch: NewBatch, limits: BatchLimits) -> BatchRecord:
        if not is_id(batch.input_file_id, FILE_PREFIX):
            raise NoInput
        with translated("batch_create"):
            try:
                reply = await self._scripts.call(
                    self._redis,
                    "batch_create",
                    batch.batch_id,
                    batch.tenant,
                    batch.endpoint,
                    batch.input_file_id,
                    batch.window,
                    batch.window_ms,
                    "" if batch.metadata is None else _encoder.encode(batch.metadata),
                    batch.output_life_ms,
                    limits.keep_ms,
                    limits.max_open,
                    limits.max_tenant_open,
                    limits.max_tenant_records,
                    share_argument(limits.max_share_per_tenant),
                    self._num_partitions,
                )
            except RedisError as error:
                if is_out_of_memory(error):
                    raise QueueFull("memory", MEMORY_RETRY_S) from error
                raise
        outcome = reply[0]
        if outcome == b"FULL":
            scope = reply[1].decode()
            if scope in STORE_SCOPES:
                raise QueueFull(scope, MEMORY_RETRY_S)
            raise BatchesFull(scope)
        if outcome != b"OK":
            raise NoInput(reply[1].decode() if outcome == b"PURPOSE" else None)
        record = await self.get(batch.batch_id, batch.tenant)
        if record is None:
            raise TransportError("the new batch does not exist")
        return record

    async def get(self, batch_id: str, tenant: str | None = None) -> BatchRecord | None:
        if not is_id(batch_id, BATCH_PREFIX):
            return None
        with translated("batch_get"):
            fields: Any = await self._redis.hgetall(self._keys.batch(batch_id))
        if not fields:
            return None
        record = _record(batch_id, fields)
        return record if tenant in (None, record.tenant) else None

    async def list(self, tenant: str, after: str | None, limit: int) -> Sequence[BatchRecord]:
        return await self._list(self._keys.batches_of(tenant), after, limit)

    async def list_open(self, limit: int) -> Sequence[BatchRecord]:
        return await self._list(self._keys.batches_open, None, limit)

    async def _list(self, index: str, after: str | None, limit: int) -> Sequence[BatchRecord]:
        found: list[BatchRecord] = []
        async for batch_id, fields in follow(self._redis, index, after, self._keys.batch):
            if len(found) >= limit:
                break
            found.append(_record(batch_id, fields))
        return found

    async def cancel(self, batch_id: str, tenant: str) -> bool:
        if not is_id(batch_id, BATCH_PREFIX):
            return False
        with translated("batch_cancel"):
            reply = await self._scripts.call(self._redis, "batch_cancel", batch_id, tenant)
        return bool(reply[0] == b"OK")

    async def drop(self, batch_id: str, tenant: str) -> bool:
        if not is_id(batch_id, BATCH_PREFIX):
            return False
        with translated("batch_drop"):
            reply = await self._scripts.call(self._redis, "batch_drop", batch_id, tenant)
        if reply[0] == b"OPEN":
            raise BatchOpen(BatchStatus(reply[1].decode()))
        return bool(reply[0] == b"OK")

    async def claim(
        self, frontend_id: str, lease_ms: int, unwanted: Sequence[str]
    ) -> BatchClaim | None:
        with translated("batch_claim"):
            reply = await self._scripts.call(
                self._redis, "batch_claim", frontend_id, lease_ms, *unwanted
            )
        return BatchClaim(reply[0].decode(), int(reply[1])) if reply else None

    async def save(
        self,
        claim: BatchClaim,
        lease_ms: int,
        progress: BatchProgress | None = None,
        *,
        status: BatchStatus | None = None,
        job_ids: Sequence[str] = (),
    ) -> Saved:
        args: list[Argument] = [] if progress is None else list(_fields(progress))
        with translated("batch_save"):
            reply = await self._scripts.call(
                self._redis,
                "batch_save",
                claim.batch_id,
                claim.fence,
                lease_ms,
                status or "",
                len(args) // 2,
                *args,
                *job_ids,
            )
        if reply[0] != b"OK":
            raise LeaseLost(claim.batch_id)
        return Saved(BatchStatus(reply[1].decode()), int(reply[2]))

    async def end(self, claim: BatchClaim, end: BatchEnd) -> BatchStatus:
        files = [
            (field, ending, parts)
            for field, ending, parts in (
                ("output_file", "output", end.output),
                ("error_file", "error", end.error_output),
            )
            if parts
        ]
        args: list[Argument] = []
        for field, ending, parts in files:
            num_bytes = sum(part.num_bytes for part in parts)
            args += (field, output_file_id(claim.batch_id, ending))
            args += (f"{claim.batch_id}_{ending}.jsonl", num_bytes, encode_parts(parts))
        with translated("batch_end"):
            reply = await self._scripts.call(
                self._redis,
                "batch_end",
                claim.batch_id,
                claim.fence,
                end.status,
                _encoder.encode([tuple(error) for error in end.errors]) if end.errors else "",
                len(files),
                *args,
                *end.useless,
            )
        if reply[0] == b"FENCED" or reply[1] == b"gone":
            raise LeaseLost(claim.batch_id)
        return BatchStatus(reply[1].decode())


def _fields(progress: BatchProgress) -> Iterator[Argument]:
    usage = progress.usage
    yield from ("total", progress.total)
    yield from ("completed", progress.completed)
    yield from ("failed", progress.failed)
    yield from ("low_line", progress.low_line)
    yield from ("low_offset", progress.low_offset)
    yield from ("done_bits", f"{progress.done_bits:x}")
    yield from ("model", progress.model or "")
    yield from ("prompt_tokens", usage.prompt_tokens)
    yield from ("completion_tokens", usage.completion_tokens)
    yield from ("cached_tokens", usage.cached_tokens)
    yield from ("output", encode_parts(progress.output))
    yield from ("error_output", encode_parts(progress.error_output))


def _record(batch_id: str, fields: Fields) -> BatchRecord:
    def text(name: str) -> str:
        return fields.get(name.encode(), b"").decode()

    def number(name: str, default: int = 0) -> int:
        return int(fields.get(name.encode(), default))

    def parts(name: str) -> tuple[FilePart, ...]:
        return decode_parts(fields.get(name.encode(), b""))

    return BatchRecord(
        batch_id=batch_id,
        tenant=text("tenant"),
        endpoint=text("endpoint"),
        input_file_id=text("input"),
        window=text("window"),
        metadata=_metadata.decode(text("metadata")) if text("metadata") else None,
        created_ms=number("created_ms"),
        expires_ms=number("expires_ms"),
        status=BatchStatus(text("status")),
        times_ms={status: number(f"{status}_ms") for status in BatchStatus if text(f"{status}_ms")},
        progress=BatchProgress(
            total=number("total"),
            completed=number("completed"),
            failed=number("failed"),
            low_line=number("low_line", 1),
            low_offset=number("low_offset"),
            done_bits=int(text("done_bits") or "0", 16),
            model=text("model") or None,
            usage=Usage(
                number("prompt_tokens"), number("completion_tokens"), number("cached_tokens")
            ),
            output=parts("output"),
            error_output=parts("error_output"),
        ),
        num_partitions=number("partitions"),
        output_file_id=text("output_file") or None,
        error_file_id=text("error_file") or None,
        errors=_errors.decode(text("errors")) if text("errors") else (),
    )

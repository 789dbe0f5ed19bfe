"""Short words for what the contract tests of files and batches do again and again."""

from __future__ import annotations

from typing import Any

from shared.transport.connect import RedisTransport
from shared.transport.partitions.transport import PartitionedTransport
from shared.transport.ports.batches import BatchLimits, BatchRecord, NewBatch, new_batch_id
from shared.transport.ports.files import FileLimits, FilePart, NewFile, new_file_id

LIMITS = BatchLimits(max_open=100, max_tenant_open=50, max_tenant_records=1000, keep_ms=86_400_000)
FILE_LIMITS = FileLimits(1000, 1_000_000, 1000, 1_000_000)


async def new_input(
    transport: RedisTransport | PartitionedTransport,
    tenant: str = "default",
    *,
    limits: FileLimits = FILE_LIMITS,
    **changes: Any,
) -> str:
    """The id of a file that a batch can read."""
    file_id = new_file_id()
    fields: dict[str, Any] = {
        "tenant": tenant,
        "purpose": "batch",
        "name": "rows.jsonl",
        "parts": (FilePart(file_id, 10, "ab"),),
        "life_ms": 86_400_000,
    }
    await transport.files.put(NewFile(file_id=file_id, **(fields | changes)), limits)
    return file_id


async def new_batch(
    transport: RedisTransport | PartitionedTransport,
    input_file_id: str | None = None,
    *,
    limits: BatchLimits = LIMITS,
    **changes: Any,
) -> BatchRecord:
    tenant = changes.get("tenant", "default")
    fields: dict[str, Any] = {
        "batch_id": new_batch_id(),
        "tenant": tenant,
        "endpoint": "/v1/completions",
        "input_file_id": input_file_id or await new_input(transport, tenant),
        "window": "24h",
        "window_ms": 86_400_000,
        "metadata": {"a": "b"},
        "output_life_ms": 86_400_000,
    }
    return await transport.batches.create(NewBatch(**(fields | changes)), limits)

"""The index of files: bounds, tenants, pages, and blobs that go when nothing refers to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shared.transport.connect import RedisTransport
from shared.transport.ports.files import (
    FileInUse,
    FileLimits,
    FilePart,
    FileRecord,
    FilesFull,
    FileUsage,
    NewFile,
    new_file_id,
)
from tests.contract.shared.transport.batch_steps import new_batch
from tests.support.polling import until
from tests.support.redis_server import assert_every_key_expires

LIMITS = FileLimits(100, 10_000, 50, 5_000)
DAY_MS = 86_400_000


def new_file(**changes: Any) -> NewFile:
    file_id = changes.pop("file_id", new_file_id())
    fields: dict[str, Any] = {
        "file_id": file_id,
        "tenant": "default",
        "purpose": "batch",
        "name": 'rows [1], "x".jsonl',
        "parts": (FilePart(file_id, 100, "ab" * 32),),
        "life_ms": DAY_MS,
    }
    return NewFile(**(fields | changes))


async def test_a_file_is_found_by_its_owner_alone(transport: RedisTransport) -> None:
    files = transport.files
    made = new_file()
    record = await files.put(made, LIMITS)
    assert record.expires_ms - record.created_ms == DAY_MS
    assert await files.get(made.file_id, "default") == record
    assert await files.get(made.file_id, "other") is None
    assert await files.get("file-0-unknown", "default") is None
    assert await files.get("../../etc/passwd", "default") is None
    assert await files.put(made, LIMITS) == record  # a lost reply
    assert await files.usage("default") == FileUsage(1, 100, 1, 100)
    assert await files.usage("other") == FileUsage(1, 100, 0, 0)


@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        ({"max_files": 1}, "files"),
        ({"max_bytes": 199}, "bytes"),
        ({"max_tenant_files": 1}, "tenant_files"),
        ({"max_tenant_bytes": 199}, "tenant_bytes"),
    ],
)
async def test_a_file_too_many_is_refused_before_anything_is_written(
    transport: RedisTransport, limits: dict[str, int], scope: str
) -> None:
    files = transport.files
    await files.put(new_file(), LIMITS)
    refused = new_file()
    with pytest.raises(FilesFull) as caught:
        await files.put(refused, dataclasses.replace(LIMITS, **limits))
    assert caught.value.scope == scope
    assert await files.get(refused.file_id, "default") is None
    assert await files.usage("default") == FileUsage(1, 100, 1, 100)
    if scope.startswith("tenant"):
        await files.put(new_file(tenant="other"), dataclasses.replace(LIMITS, **limits))


async def test_pages_go_on_after_the_last_one(transport: RedisTransport) -> None:
    files = transport.files
    made: list[FileRecord] = []
    for index in range(7):
        purpose = "batch" if index % 2 else "batch_output"
        made.append(await files.put(new_file(purpose=purpose), LIMITS))
        redis: Any = transport.connections.commands
        await redis.zadd(transport.keys.files_of("default"), {made[-1].file_id: index})
    ids = [record.file_id for record in made]

    async def page(after: str | None, limit: int, **more: Any) -> list[str]:
        requested = {"oldest_first": False, "purpose": None} | more
        return [record.file_id for record in await files.list("default", after, limit, **requested)]

    assert await page(None, 100) == ids[::-1]
    assert await page(None, 100, oldest_first=True) == ids
    assert await page(ids[4], 2) == [ids[3], ids[2]]
    assert await page(ids[4], 2, oldest_first=True) == [ids[5], ids[6]]
    assert await page(None, 2, purpose="batch") == [ids[5], ids[3]]
    assert await page("file-0-unknown", 2) == []
    assert await files.list("other", None, 9, oldest_first=False, purpose=None) == []


async def test_a_dropped_files_blobs_are_named_until_they_are_removed(
    transport: RedisTransport,
) -> None:
    files = transport.files
    parts = (FilePart("b.1.out", 10, "ab"), FilePart("b.2.out", 0, "cd"))
    made = new_file(parts=parts)
    await files.put(made, LIMITS)
    assert await files.drop(made.file_id, "other") is False
    assert await files.drop(made.file_id, "default") is True
    assert await files.drop(made.file_id, "default") is False
    assert await files.usage("default") == FileUsage(0, 0, 0, 0)
    assert sorted(await files.sweep([], 10)) == ["b.1.out", "b.2.out"]
    assert await files.sweep(["b.1.out"], 10) == ["b.2.out"]
    assert await files.sweep(["b.2.out"], 10) == []


async def test_an_empty_file_comes_and_goes(transport: RedisTransport) -> None:
    made = new_file(parts=(FilePart("empty", 0, "ab"),))
    await transport.files.put(made, LIMITS)
    assert await transport.files.drop(made.file_id, "default") is True
    assert await transport.files.usage("default") == FileUsage(0, 0, 0, 0)


async def test_a_file_that_has_expired_is_gone_and_then_swept(transport: RedisTransport) -> None:
    files = transport.files
    short, long = new_file(life_ms=1), new_file()
    await files.put(short, LIMITS)
    await files.put(long, LIMITS)

    async def swept() -> bool:
        return list(await files.sweep([], 10)) == [short.file_id]

    await until(swept)
    assert await files.get(short.file_id, "default") is None
    assert await files.get(long.file_id, "default") is not None
    assert await files.usage("default") == FileUsage(1, 100, 1, 100)


async def test_bytes_are_counted_anew_when_a_record_was_lost(transport: RedisTransport) -> None:
    files, redis = transport.files, transport.connections.commands
    lost, kept = new_file(life_ms=1), new_file()
    await files.put(lost, LIMITS)
    await files.put(kept, LIMITS)
    await redis.delete(transport.keys.file(lost.file_id))

    async def swept() -> bool:
        await files.sweep([], 10)
        return (await files.usage("default")).num_files == 1

    await until(swept)
    assert await files.usage("default") == FileUsage(1, 100, 1, 100)
    await assert_every_key_expires(redis, transport.keys.namespace)


async def test_the_input_of_an_open_batch_stays(transport: RedisTransport) -> None:
    files = transport.files
    made = new_file(life_ms=1000)
    await files.put(made, LIMITS)
    record = await new_batch(transport, made.file_id, window_ms=DAY_MS)
    kept = await files.get(made.file_id, "default")
    assert kept is not None
    assert kept.expires_ms > record.expires_ms
    with pytest.raises(FileInUse):
        await files.drop(made.file_id, "default")
    await transport.batches.cancel(record.batch_id, "default")
    assert await files.drop(made.file_id, "default") is True

"""Bytes on a disk: written once, read as they were recorded, removed when nobody knows them."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api.batches.results import ResultFile
from api.files.storage import (
    BLOB_LIFE_S,
    BLOCK_BYTES,
    UNFINISHED_LIFE_S,
    BlobDamaged,
    BlobsUnavailable,
    FileStorage,
)
from shared.transport.ports.files import FilePart


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileStorage]:
    made = FileStorage(str(tmp_path), "ns")
    await made.check_directory()
    yield made
    made.close()


async def content(storage: FileStorage, *parts: FilePart) -> bytes:
    return b"".join([block async for block in storage.read(parts)])


async def test_a_blob_has_its_name_when_it_is_whole(storage: FileStorage, tmp_path: Path) -> None:
    writer = await storage.create("a", whole=True)
    await writer.append([b"one ", b"two"])
    assert not (tmp_path / "ns.files" / "a").exists()
    part = await writer.commit()
    await writer.aclose()
    assert part == FilePart("a", 7, hashlib.sha256(b"one two").hexdigest())
    await storage.check([part])
    assert await content(storage, part, part) == b"one twoone two"
    assert stat.S_IMODE((tmp_path / "ns.files" / "a").stat().st_mode) & 0o007 == 0


async def test_nothing_stays_of_an_upload_that_was_given_up(
    storage: FileStorage, tmp_path: Path
) -> None:
    writer = await storage.create("a", whole=True)
    await writer.append([b"x"])
    await writer.aclose()
    await writer.aclose()
    assert list((tmp_path / "ns.files").iterdir()) == []


async def test_a_name_is_used_once(storage: FileStorage) -> None:
    writer = await storage.create("a", whole=False)
    with pytest.raises(FileExistsError):
        await storage.create("a", whole=False)
    await writer.aclose()


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", ".hidden", "a\n", "a" * 201])
async def test_no_name_leads_out_of_the_directory(storage: FileStorage, name: str) -> None:
    with pytest.raises(ValueError, match="invalid blob name"):
        await storage.create(name, whole=True)


async def test_deployments_on_one_disk_do_not_meet(tmp_path: Path) -> None:
    for namespace in ("a", "b", "..", "."):
        storage = FileStorage(str(tmp_path / "root"), namespace)
        await storage.check_directory()
        await (await storage.create("x", whole=False)).aclose()
        storage.close()
    root = tmp_path / "root"
    assert sorted(os.listdir(root)) == ["...files", "..files", "a.files", "b.files"]
    assert os.listdir(tmp_path) == ["root"]


async def test_a_part_is_as_long_as_was_recorded_whatever_follows(storage: FileStorage) -> None:
    writer = await storage.create("a", whole=False)
    await writer.append([b"saved"])
    part = writer.part
    await writer.append([b" and what a writer taken for dead still wrote"])
    await writer.aclose()
    assert await content(storage, part) == b"saved"


async def test_damage_is_noticed(storage: FileStorage, tmp_path: Path) -> None:
    data = b"x" * (2 * BLOCK_BYTES)
    writer = await storage.create("a", whole=False)
    await writer.append([data])
    part = writer.part
    await writer.aclose()
    path = tmp_path / "ns.files" / "a"
    path.write_bytes(data[:-1] + b"y")
    await storage.check([part])
    read: list[bytes] = []

    async def read_on() -> None:
        async for block in storage.read([part]):
            read.append(block)

    with pytest.raises(BlobDamaged):
        await read_on()
    assert len(b"".join(read)) < len(data)  # a reader never gets all of something else
    path.write_bytes(data[:-1])
    for _ in range(2):
        with pytest.raises(BlobDamaged):
            await storage.check([part])
        path.unlink(missing_ok=True)


async def test_without_a_directory_everything_is_refused_in_words(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_bytes(b"")
    for root, words in (("", "PENSTOCK_FILES_DIR is not set"), (str(taken), "is unusable")):
        storage = FileStorage(root, "ns")
        await storage.check_directory()
        assert not storage.is_available
        with pytest.raises(BlobsUnavailable, match=words):
            await storage.create("a", whole=True)
        storage.close()


async def test_a_directory_that_comes_back_is_used_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.write_bytes(b"")
    storage = FileStorage(str(root), "ns")
    await storage.check_directory()
    root.unlink()
    await storage.check_directory()
    assert storage.is_available
    storage.close()


async def test_removing_what_is_not_there_counts(storage: FileStorage, tmp_path: Path) -> None:
    await (await storage.create("a", whole=False)).aclose()
    assert await storage.remove(["a", "never"]) == ["a", "never"]
    assert list((tmp_path / "ns.files").iterdir()) == []


@pytest.mark.promise(
    "Batches: files are limited in number, bytes and lifetime, and leave nothing on the disk"
)
async def test_orphaned_files_are_removed(storage: FileStorage, tmp_path: Path) -> None:
    folder, now_s = tmp_path / "ns.files", time.time()
    for name, age_s in (
        ("old", BLOB_LIFE_S + 60),
        ("young", BLOB_LIFE_S - 60),
        ("died.part", UNFINISHED_LIFE_S + 60),
        ("lives.part", UNFINISHED_LIFE_S - 60),
        ("touched", BLOB_LIFE_S + 60),
    ):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (now_s - age_s, now_s - age_s))
    await storage.touch("touched")
    assert await storage.remove_orphans() == 2
    assert {path.name for path in folder.iterdir()} == {"young", "lives.part", "touched"}


async def test_results_are_what_each_owner_saved(storage: FileStorage) -> None:
    first = ResultFile(storage, (), "b.1.out")
    assert first.parts == ()
    await first.append([])
    assert first.parts == ()  # and no blob
    await first.append([b"1\n", b"2\n"])
    saved = first.parts
    await first.append([b"3\n"])
    second = ResultFile(storage, saved, "b.2.out")
    assert second.parts == saved
    await second.append([b"three\n"])
    await first.append([b"4\n"])
    assert await content(storage, *second.parts) == b"1\n2\nthree\n"
    for file in (first, second):
        await file.aclose()

"""FileStorage: blobs by name in a directory that all frontends of a deployment share.

A blob is written once, from its start to its end, by one process. Which bytes of it may be read,
and their digest, is recorded elsewhere (shared/transport/ports/files.py). Every call that touches
the disk runs in a thread pool of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shared.transport.ports.files import FilePart

log = logging.getLogger(__name__)

Result = TypeVar("Result")

THREADS = 4
BLOCK_BYTES = 256 * 1024
NOT_CHECKED = "its directory does not respond."
UNFINISHED = ".part"
UNFINISHED_LIFE_S = 86_400.0  # since the last byte was written
# Longer than any file may live (ApiSettings.file_life_s) with the batch that reads it: no record
# refers to a blob that is older, whatever Redis has lost.
BLOB_LIFE_S = 110 * 86_400.0

_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,199}")


class BlobsUnavailable(Exception):
    """This process has no directory for blobs, or cannot use it. The message is the reason."""


class BlobDamaged(Exception):
    """A blob is missing, shorter than recorded, or has other bytes."""


class BlobWriter:
    """Writes a new blob. For one task at a time; every method may raise OSError.

    Bytes are certain to be on the disk only when `sync` or `commit` has returned.
    """

    def __init__(self, blobs: FileStorage, path: Path, descriptor: int, final: Path) -> None:
        self.num_bytes = 0
        self.name = final.name
        self._blobs = blobs
        self._path = path
        self._final = final
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self._is_open = True

    @property
    def part(self) -> FilePart:
        """The bytes appended so far."""
        return FilePart(self.name, self.num_bytes, self._hash.hexdigest())

    async def append(self, pieces: Sequence[bytes]) -> None:
        await self._blobs.run(self._append, pieces)

    async def sync(self) -> None:
        """Flushes the appended bytes to the disk."""
        await self._blobs.run(os.fsync, self._descriptor)

    async def commit(self) -> FilePart:
        """Ends a blob that was created with `whole`: flushes it and gives it its name."""
        await self._blobs.run(self._commit)
        return self.part

    async def aclose(self) -> None:
        """Closes the file; removes a `whole` blob that was not committed. Idempotent."""
        if self._is_open:
            self._is_open = False
            await self._blobs.run(self._close)

    def _append(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            left = memoryview(piece)
            at = self.num_bytes
            while left:
                written = os.pwrite(self._descriptor, left, at)
                left, at = left[written:], at + written
            self._hash.update(piece)
            self.num_bytes = at

    def _commit(self) -> None:
        os.fsync(self._descriptor)
        self._path.rename(self._final)
        self._path = self._final
        _sync_directory(self._final.parent)

    def _close(self) -> None:
        os.close(self._descriptor)
        if self._path.name.endswith(UNFINISHED):
            self._path.unlink(missing_ok=True)


class FileStorage:
    """One directory. Until `check_directory` has found it usable, calls raise BlobsUnavailable."""

    def __init__(self, root: str, namespace: str) -> None:
        # Deployments may share a disk. The suffix keeps a namespace of dots from meaning another.
        self._directory = Path(root) / f"{namespace}.files" if root else None
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="disk")
        self._why_not = NOT_CHECKED if root else "PENSTOCK_FILES_DIR is not set."

    async def check_directory(self) -> None:
        """Checks whether the directory can be used; creates it if it is missing.

        Raises nothing: a fault is logged once, and is the message of BlobsUnavailable.
        """
        if self._directory is None:
            return
        try:
            await self.run(_make_usable, self._directory)
            why_not = ""
        except OSError as error:
            why_not = f"its directory is unusable ({error.strerror})."
        if why_not and why_not != self._why_not:
            log.error(
                "the files directory is unavailable",
                extra={"directory": str(self._directory), "reason": why_not},
            )
        self._why_not = why_not

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def is_available(self) -> bool:
        return not self._why_not

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Runs `work` in a thread and returns its result.

        A cancel waits for the end of `work`, so that its file is not closed under it.
        """
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait((future,))
            raise

    async def create(self, name: str, *, whole: bool) -> BlobWriter:
        """Returns the writer of a new blob.

        With `whole` the blob gets its name by `commit`; else it has it at once, and grows.
        Raises BlobsUnavailable and OSError; FileExistsError for a name that was used before.
        """
        final = self._path(name)
        path = final.with_name(final.name + UNFINISHED) if whole else final

        def open_new() -> int:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
            if not whole:
                _sync_directory(path.parent)
            return descriptor

        return BlobWriter(self, path, await self.run(open_new), final)

    async def check(self, parts: Sequence[FilePart]) -> None:
        """Raises BlobDamaged if a blob is missing or too short, and BlobsUnavailable."""
        paths = [self._path(part.name) for part in parts]

        def compare() -> None:
            for path, part in zip(paths, parts, strict=True):
                try:
                    num_bytes = path.stat().st_size
                except OSError as error:
                    raise BlobDamaged(f"{part.name}: {error.strerror}") from error
                if num_bytes < part.num_bytes:
                    raise BlobDamaged(f"{part.name}: {num_bytes} of {part.num_bytes} bytes")

        await self.run(compare)

    async def read(self, parts: Sequence[FilePart]) -> AsyncIterator[bytes]:
        """Yields the bytes of the parts in blocks.

        Raises BlobDamaged before the last block of a part that does not match its digest.
        """
        for part in parts:
            descriptor = await self.run(os.open, self._path(part.name), os.O_RDONLY)
            try:
                digest, at = hashlib.sha256(), 0
                while at < part.num_bytes:
                    size = min(BLOCK_BYTES, part.num_bytes - at)
                    block = await self.run(os.pread, descriptor, size, at)
                    digest.update(block)
                    at += len(block)
                    if not block or (at == part.num_bytes and digest.hexdigest() != part.sha256):
                        raise BlobDamaged(f"{part.name}: the bytes differ from those written")
                    yield block
            finally:
                os.close(descriptor)

    def path_of(self, part: FilePart) -> Path:
        """Returns the path of a part's blob. Raises BlobsUnavailable."""
        return self._path(part.name)

    async def touch(self, name: str) -> None:
        """Marks a blob as used, so that it does not count as old."""
        with contextlib.suppress(OSError):
            await self.run(os.utime, self._path(name))

    async def remove(self, names: Sequence[str]) -> list[str]:
        """Removes blobs; returns the names that do not exist any more. Raises BlobsUnavailable."""
        paths = [self._path(name) for name in names]

        def unlink() -> list[str]:
            gone = []
            for path in paths:
                try:
                    path.unlink(missing_ok=True)
                    gone.append(path.name)
                except OSError as error:
                    log.warning(
                        "failed to delete a file's blob",
                        extra={"blob": path.name, "reason": str(error)},
                    )
            return gone

        return await self.run(unlink)

    async def remove_orphans(self) -> int:
        """Removes very old blobs and abandoned uploads; returns how many."""
        if self._directory is None:
            return 0
        return await self.run(_remove_orphans, self._directory)

    def _path(self, name: str) -> Path:
        if self._directory is None or self._why_not:
            raise BlobsUnavailable(f"This frontend has no files: {self._why_not}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"invalid blob name: {name[:80]!r}")
        return self._directory / name


def _make_usable(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o750)
    probe = directory / f"probe-{os.getpid()}-{time.time_ns()}{UNFINISHED}"
    probe.write_bytes(b"")
    probe.unlink()


def _remove_orphans(directory: Path) -> int:
    count, now_s = 0, time.time()
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):  # removed by another frontend
            age_s = now_s - entry.stat(follow_symlinks=False).st_mtime
            limit_s = UNFINISHED_LIFE_S if entry.name.endswith(UNFINISHED) else BLOB_LIFE_S
            if age_s > limit_s and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
                count += 1
    return count


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

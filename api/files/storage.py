"""FileStorage: bytes by name in a directory that all frontends of a deployment share.

A blob is written once, from its start to its end, by one process; what may be read of it, and by
which digest it is known, is written down elsewhere (shared/transport/ports/files.py). Every call
that touches the disk does so on a thread of the room's own.
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
NOT_LOOKED = "its directory does not answer."
UNFINISHED = ".part"
UNFINISHED_LIFE_S = 86_400.0  # since the last byte came
# Longer than any file may live (ApiSettings.file_life_s) with the batch that reads it. What is
# older is known to nobody, whatever Redis has forgotten.
BLOB_LIFE_S = 110 * 86_400.0

_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,199}")


class BlobsUnavailable(Exception):
    """This process has no directory for blobs, or cannot use it; the text says why."""


class BlobDamaged(Exception):
    """A blob is missing, shorter than its record says, or has other bytes."""


class BlobWriter:
    """A new blob, being written. Not safe for several tasks; nothing of it is promised to be on the
    disk before `sync` or `commit` has returned. Every method may raise OSError."""

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
        """All that was appended so far."""
        return FilePart(self.name, self.num_bytes, self._hash.hexdigest())

    async def append(self, pieces: Sequence[bytes]) -> None:
        await self._blobs.run(self._append, pieces)

    async def sync(self) -> None:
        """Returns when what was appended would survive a loss of power."""
        await self._blobs.run(os.fsync, self._descriptor)

    async def commit(self) -> FilePart:
        """The blob is whole, and has its name from now on."""
        await self._blobs.run(self._commit)
        return self.part

    async def aclose(self) -> None:
        """Of a blob that was made `whole=False` nothing stays without `commit`. Idempotent."""
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
    """One directory. Until `look` has found it usable, everything is refused in words."""

    def __init__(self, root: str, namespace: str) -> None:
        # Deployments may share a disk. The suffix keeps a namespace of dots from meaning another.
        self._directory = Path(root) / f"{namespace}.files" if root else None
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="disk")
        self._why_not = NOT_LOOKED if root else "FILES_DIR is not set."

    async def look(self) -> None:
        """Whether the directory can be used now; makes it where it is missing. Never raises: what
        is wrong with it is said in the log, once, and in each refusal."""
        if self._directory is None:
            return
        try:
            await self.run(_make_usable, self._directory)
            why_not = ""
        except OSError as error:
            why_not = f"its directory cannot be used ({error.strerror})."
        if why_not and why_not != self._why_not:
            log.error(
                "files are unavailable",
                extra={"directory": str(self._directory), "reason": why_not},
            )
        self._why_not = why_not

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def is_available(self) -> bool:
        return not self._why_not

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """`work` on a thread for what waits for the disk. It is finished also when its caller is
        cancelled: what it holds must not be taken from it."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait((future,))
            raise

    async def create(self, name: str, *, whole: bool) -> BlobWriter:
        """`whole`: it gets its name with `commit`; else it has it from the start, and grows.

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
        """Raises BlobDamaged where one is missing or too short, BlobsUnavailable."""
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
        """The parts' bytes, block by block.

        Raises BlobDamaged, before the last block of a part whose bytes are not those of its digest.
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
                        raise BlobDamaged(f"{part.name}: other bytes than were written")
                    yield block
            finally:
                os.close(descriptor)

    def path_of(self, part: FilePart) -> Path:
        """Where a part's blob is, for a reader of its own. Raises BlobsUnavailable."""
        return self._path(part.name)

    async def touch(self, name: str) -> None:
        """It is in use, however old it is."""
        with contextlib.suppress(OSError):
            await self.run(os.utime, self._path(name))

    async def remove(self, names: Sequence[str]) -> list[str]:
        """Those that are not there any more. Raises BlobsUnavailable."""
        paths = [self._path(name) for name in names]

        def unlink() -> list[str]:
            gone = []
            for path in paths:
                try:
                    path.unlink(missing_ok=True)
                    gone.append(path.name)
                except OSError as error:
                    log.warning("blob stays", extra={"blob": path.name, "reason": str(error)})
            return gone

        return await self.run(unlink)

    async def remove_forgotten(self) -> int:
        """Removes what nobody can know any more: very old blobs, uploads that died; how many."""
        if self._directory is None:
            return 0
        return await self.run(_remove_forgotten, self._directory)

    def _path(self, name: str) -> Path:
        if self._directory is None or self._why_not:
            raise BlobsUnavailable(f"This frontend has no files: {self._why_not}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a blob's name: {name[:80]!r}")
        return self._directory / name


def _make_usable(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o750)
    probe = directory / f"probe-{os.getpid()}-{time.time_ns()}{UNFINISHED}"
    probe.write_bytes(b"")
    probe.unlink()


def _remove_forgotten(directory: Path) -> int:
    count, now_s = 0, time.time()
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):  # another frontend was first
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

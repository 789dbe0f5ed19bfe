"""DiskBlocks: copies of KV blocks as files, which outlive the worker.

    DIR/penstock-kv-0/lock                         held by the worker that uses the folder
                     /<model>/<tenant>/<block>     one file for each block

Each name is a hash in hexadecimal: of all that the content of a block depends on but its tokens
(see `fingerprint`), of the tenant, and the block's key. A file has a checksum over its content and
these three, so that one that is cut off, damaged or in another place is never loaded. It gets its
name when it is whole. Other models' files in the worker's folder are deleted at its start.

Several workers may be given one DIR: each takes the first folder that no other holds, and bounds
it on its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from worker.engine.block_hash import BlockHash
from worker.engine.offload import TenantLRU
from worker.model.errors import ModelError

log = logging.getLogger(__name__)

_MAX_WORKERS = 256  # folders in one DIR
_READ_BYTES = 64 << 20  # in a step: some 30 ms of a fast disk
_CHECKSUM_BYTES = 16  # after the content
_Content = np.ndarray[tuple[int], np.dtype[np.uint8]]
_HEX = re.compile(r"[0-9a-f]{32}")


class DiskBlocks:
    """Implements worker.engine.offload.OffloadDisk. `write` has a thread of its own."""

    def __init__(self, directory: Path, model: str, slots: Tensor, max_bytes: int) -> None:
        """`slots`: see HostBlocks; `model` is a fingerprint. Raises ModelError where the directory
        cannot be used."""
        self._slots = slots
        self.reads_per_step = max(1, _READ_BYTES // slots.shape[1])
        self._model = model
        self._content_bytes = slots.shape[1]
        self._max_files = max_bytes // (self._content_bytes + _CHECKSUM_BYTES)
        if self._max_files < 1:
            raise ModelError(
                f"PENSTOCK_KV_OFFLOADING_DIR_GB: {max_bytes / 2**20:.1f} MiB cannot hold one block "
                f"of {self._content_bytes / 2**20:.1f} MiB"
            )
        self._mutex = threading.Lock()  # of the three below
        self._files: TenantLRU[bool] = TenantLRU()  # by the hash of the tenant
        self._ended: list[BlockHash] = []
        self._gone: list[BlockHash] = []
        self._is_failing = False
        try:
            folder, self._lock = _take_folder(directory)
            self._path = folder / model
            self._path.mkdir(mode=0o700, exist_ok=True)
            self._find_files(folder)
        except OSError as error:
            raise ModelError(f"PENSTOCK_KV_OFFLOADING_DIR={directory}: {error}") from error
        self._writes: queue.SimpleQueue[tuple[BlockHash, str, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="kv-disk", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._files)

    def holds(self, key: BlockHash, tenant: str) -> bool:
        with self._mutex:
            return self._files.get(key, _hash_of(tenant)) is not None

    def write(self, key: BlockHash, tenant: str, slot: int) -> None:
        self._writes.put((key, _hash_of(tenant), slot))

    def read(self, key: BlockHash, tenant: str) -> Tensor | None:
        """Returns the content [bytes] uint8; None without a valid file. One that is damaged is
        deleted."""
        if not self.holds(key, tenant):
            return None
        path = self._path_of(key, _hash_of(tenant))
        try:
            stored = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            if not self.holds(key, tenant):
                return None  # a write has made room meanwhile
            log.warning("a KV block cannot be read, and is computed again: %s", error)
            stored = np.empty(0, dtype=np.uint8)
        content, checksum = stored[: self._content_bytes], stored[self._content_bytes :]
        if checksum.tobytes() != self._checksum(key, _hash_of(tenant), content):
            if len(stored):
                log.warning("the KV block %s is damaged, and is computed again", path)
            self._forget(key)
            return None
        with self._mutex:
            if key in self._files:
                self._files.touch(key)
        with contextlib.suppress(OSError):  # a write has made room meanwhile
            os.utime(path)  # for the order of use in a later worker
        return torch.from_numpy(content)

    def drain(self) -> tuple[list[BlockHash], list[BlockHash]]:
        with self._mutex:
            ended, self._ended = self._ended, []
            gone, self._gone = self._gone, []
        return ended, gone

    def close(self) -> None:
        """Waits for the writes, and leaves the folder to other workers. Idempotent."""
        if not self._lock.closed:
            self._writes.put(None)
            self._thread.join()
            self._lock.close()

    def _write_all(self) -> None:
        while (item := self._writes.get()) is not None:
            key, hashed, slot = item
            try:
                self._write(key, hashed, self._slots[slot].numpy())
                self._is_failing = False
            except Exception as error:
                if not self._is_failing:  # a full disk would have a line for every block
                    log.warning(
                        "KV blocks cannot be written, and are lost: %s",
                        error,
                        exc_info=not isinstance(error, OSError),
                    )
                self._is_failing = True
            finally:
                with self._mutex:
                    self._ended.append(key)

    def _write(self, key: BlockHash, hashed: str, content: _Content) -> None:
        self._make_room(self._max_files - 1, hashed)
        path = self._path_of(key, hashed)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        partial = path.with_suffix(".part")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content.data)
                file.write(self._checksum(key, hashed, content))
            partial.rename(path)
        except Exception:
            partial.unlink(missing_ok=True)
            raise
        with self._mutex:
            self._files.add(key, hashed, True)

    def _make_room(self, most: int, hashed: str = "") -> None:
        """Leaves `most` files, before one of the tenant with that hash is added."""
        while len(self._files) > most:
            with self._mutex:
                key = self._files.next_victim(hashed)[0]
            self._forget(key)

    def _forget(self, key: BlockHash) -> None:
        """Deletes a file, unless another thread has."""
        with self._mutex:
            if key not in self._files:
                return
            hashed, _ = self._files.remove(key)
            self._gone.append(key)
        with contextlib.suppress(OSError):  # it is not loaded any more, and deleted at a start
            self._path_of(key, hashed).unlink()

    def _find_files(self, folder: Path) -> None:
        """Learns the files of earlier workers, and deletes those of no use."""
        for path in folder.iterdir():
            if path != self._path and _HEX.fullmatch(path.name) and _is_folder(path):
                shutil.rmtree(path)
        size = self._content_bytes + _CHECKSUM_BYTES
        found = []
        for path in _files_in(self._path):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if status.st_size == size and _HEX.fullmatch(path.name):
                found.append((status.st_mtime_ns, path))
            else:
                path.unlink()
        for _, path in sorted(found):
            key = BlockHash(bytes.fromhex(path.name))
            if key in self._files:  # for another tenant: one of the two was put there
                path.unlink()
            else:
                self._files.add(key, path.parent.name, True)
        self._make_room(self._max_files)
        self._gone.clear()  # no other object knew of them

    def _path_of(self, key: BlockHash, hashed: str) -> Path:
        return self._path / hashed / key.hex()

    def _checksum(self, key: BlockHash, hashed: str, content: _Content) -> bytes:
        hasher = xxhash.xxh3_128(f"{self._model}/{hashed}/{key.hex()}/".encode())
        hasher.update(content.data)
        return hasher.digest()


def fingerprint(checkpoint: Path, sources: Iterable[Path], parts: dict[str, object]) -> str:
    """Returns a name for all that the keys and values of given tokens depend on: the checkpoint's
    files, by name, size and time of change; the program's in the folders `sources`, by content; and
    `parts`, which JSON can write."""
    files = [
        (path.name, status.st_size, status.st_mtime_ns)
        for path in sorted(checkpoint.iterdir())
        if path.suffix in (".json", ".safetensors", ".gguf")
        for status in (path.stat(),)
    ]
    program = [
        (path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for folder in sources
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".py", ".cpp", ".h")
    ]
    text = json.dumps({"format": 1, "files": files, "program": program, **parts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=1024)
def _hash_of(tenant: str) -> str:
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _files_in(path: Path) -> Iterator[Path]:
    for folder in path.iterdir():
        if _HEX.fullmatch(folder.name) and _is_folder(folder):
            yield from folder.iterdir()


def _take_folder(directory: Path) -> tuple[Path, TextIO]:
    """Returns the first folder that no other worker holds, and its lock, which the system opens
    when this process ends. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(_MAX_WORKERS):
        folder = directory / f"penstock-kv-{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = open(folder / "lock", "w", encoding="ascii")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder, lock
        except BlockingIOError:
            lock.close()
    raise OSError(f"{_MAX_WORKERS} workers use it already")

"""Reads pieces of stored tensors in threads into the weights of the model.

safetensors' memory map would be read by one thread, page fault by page fault, and copied once more:
a tenth of the disk's speed with a cold page cache.

On the CPU a piece that needs no conversion is read into the weight itself. Others, and all on CUDA,
go through two buffers of each thread, in pinned memory there: one is copied to the device while the
next piece is read into the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from worker.model.layers.linear_method import Place
from worker.model.weights.fp8_scales import StoredScales
from worker.model.weights.safetensors_files import StoredTensor

PIECE_BYTES = 16 << 20  # of whole rows; a longer row is a piece
NUM_THREADS = 4
_NUM_BUFFERS = 2  # of a thread


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """Rows [start, stop) of a stored tensor, and where they go."""

    tensor: StoredTensor
    place: Place
    start: int
    stop: int
    scales: StoredScales | None  # of a tensor in FP8

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * (self.tensor.num_bytes // self.tensor.shape[0])

    def into(self) -> Tensor:
        """Returns the part of the weight that the rows fill."""
        place = self.place
        assert place.data is not None, "there are pieces of what a rank needs"
        return place.data[self.start - place.rows.start : self.stop - place.rows.start]

    def memory(self) -> Tensor | None:
        """Returns the weight's own bytes, uint8 [num_bytes], if it has them as they are stored, on
        the host."""
        into, columns = self.into(), self.place.columns
        is_whole = columns is None or columns.is_all
        if into.device.type != "cpu" or into.dtype != self.tensor.dtype or not is_whole:
            return None
        return into.view(-1).view(torch.uint8)

    def rows(self, memory: Tensor) -> Tensor:
        """Returns the numbers which uint8 `memory` [num_bytes], on the host, holds,
        [stop - start, ...]."""
        return self.tensor.numbers(memory)

    def put(self, rows: Tensor) -> None:
        """Copies rows, on the weight's device, into the weight."""
        into, columns = self.into(), self.place.columns
        if columns is not None and not columns.is_all:
            rows = rows[:, columns.start : columns.stop]
        if self.scales is not None and self.place.scales is None:
            assert columns is not None, "a weight in FP8 is a matrix"
            rows = rows.float()
            rows *= self.scales.of(self.start, self.stop, columns).to(into.device)
        into.copy_(rows)


def pieces_of(
    tensor: StoredTensor, place: Place, scales: StoredScales | None
) -> Iterator[WeightChunk]:
    """Yields what a rank needs of a tensor, in their order in the file."""
    if place.data is None or not place.rows.size:
        return
    together = tensor.rows_at_once
    at_once = max(1, PIECE_BYTES // max(1, tensor.row_bytes) // together) * together
    for start in range(place.rows.start, place.rows.stop, at_once):
        yield WeightChunk(tensor, place, start, min(start + at_once, place.rows.stop), scales)


@dataclass(slots=True)
class ReadingTime:
    """The bytes read, and the time they took."""

    num_bytes: int = 0
    seconds: float = 0.0
    reading_seconds: float = 0.0  # of `seconds`, while some thread was reading
    _num_reading: int = 0
    _since_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_reading:
                self._since_s = time.perf_counter()
            self._num_reading += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_reading -= 1
            if not self._num_reading:
                self.reading_seconds += time.perf_counter() - self._since_s


class Copier(Protocol):
    """How pieces come from a buffer to the weights' device. Called by several threads."""

    def enter_thread(self) -> None:
        """Comes first in each thread."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """Returns uint8 memory [num_bytes] on the host."""
        ...

    def copy(self, piece: WeightChunk, memory: Tensor) -> Callable[[], None]:
        """Begins to put the piece, whose bytes are in `memory`. Returns a function that waits until
        the memory may be written again."""
        ...

    def finish(self) -> None:
        """Waits for all copies."""
        ...


class HostCopier:
    """Converts on the CPU, a piece at a time: with torch's threads, of which each reader would have
    as many."""

    def __init__(self) -> None:
        self._converting = threading.Lock()

    def enter_thread(self) -> None:
        pass

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, piece: WeightChunk, memory: Tensor) -> Callable[[], None]:
        rows = piece.rows(memory)
        with self._converting:
            piece.put(rows)
        return lambda: None

    def finish(self) -> None:
        pass


class CudaCopier:
    """Copies from pinned memory, in the order of the device's default stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, piece: WeightChunk, memory: Tensor) -> Callable[[], None]:
        piece.put(piece.rows(memory).to(self._device, non_blocking=True))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return copied.synchronize

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def copier_for(device: torch.device) -> Copier:
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


class _Buffers(threading.local):
    """A thread's own, and what waits until each may be written."""

    def __init__(self) -> None:
        self.memories: list[Tensor | None] = [None] * _NUM_BUFFERS
        self.waits: list[Callable[[], None]] = [lambda: None] * _NUM_BUFFERS
        self.turn = 0


def read_pieces(
    pieces: Sequence[WeightChunk],
    copier: Copier,
    on_progress: Callable[[float], None] | None = None,
) -> ReadingTime:
    """Fills the weights. Memory beside them is that of the threads' buffers, and of a conversion.

    `on_progress` gets the share of the bytes that are in place, in this thread. Raises
    CheckpointError for the first piece that cannot be read; the others are not started then.
    """
    reading, buffers = ReadingTime(), _Buffers()

    def read(piece: WeightChunk) -> None:
        if (own := piece.memory()) is not None:
            with reading:
                piece.tensor.read_into(own, piece.start)
            return
        turn = buffers.turn = (buffers.turn + 1) % _NUM_BUFFERS
        buffers.waits[turn]()
        memory = buffers.memories[turn]
        if memory is None or len(memory) < piece.num_bytes:
            memory = buffers.memories[turn] = copier.buffer(max(piece.num_bytes, PIECE_BYTES))
        memory = memory[: piece.num_bytes]
        with reading:
            piece.tensor.read_into(memory, piece.start)
        buffers.waits[turn] = copier.copy(piece, memory)

    total = sum(piece.num_bytes for piece in pieces)
    began = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS, "weights", copier.enter_thread) as pool:
        futures = [pool.submit(read, piece) for piece in pieces]
        try:
            for piece, future in zip(pieces, futures, strict=True):
                future.result()
                reading.num_bytes += piece.num_bytes
                if on_progress is not None:
                    on_progress(reading.num_bytes / total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    copier.finish()
    reading.seconds = time.perf_counter() - began
    return reading

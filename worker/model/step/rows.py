"""SequenceRows: the block tables of live sequences, kept between steps on host and device."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Set
from collections.abc import Sequence as View
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.model.device import to_device

IntArray = np.ndarray[Any, np.dtype[np.int32]]

_LEAST_WIDTH = 16


class SequenceRows:
    """One row of a table for each sequence, in each KV group; a step writes only new values.

    A row is known by the block table itself, which only ever grows: one that lost its blocks comes
    back with another list. Rows of sequences that are gone are taken when there is no free one.
    On the CPU host and device share the table.
    """

    def __init__(self, num_rows: int, device: torch.device, num_groups: int = 1) -> None:
        self._device = device
        self._num_groups = num_groups
        self.is_shared = device.type == "cpu"
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._tables: list[View[int] | None] = []  # by row, as is what follows
        self._known: list[int] = []  # blocks of all groups
        self.num_blocks: IntArray = np.zeros(0, dtype=np.int32)  # of each group
        self.table: IntArray = np.zeros((num_groups, 0, _LEAST_WIDTH), dtype=np.int32)
        self.there = torch.from_numpy(self.table)  # on the device
        self._written: list[tuple[int, int, int]] = []  # cells that the device lacks: row, columns
        self._add_rows(num_rows)

    def of(self, seq_ids: View[int], block_tables: View[View[int]], batch: Set[int]) -> IntArray:
        """Returns the rows of these sequences, which hold their block tables from now on.

        `batch` are all sequences whose rows are in use, these included.
        """
        tables, known = self._tables, self._known
        rows = list(map(self._row_of.get, seq_ids, repeat(-1)))
        are_same = map(operator.is_, map(tables.__getitem__, rows), block_tables)
        if all(are_same) and list(map(known.__getitem__, rows)) == list(map(len, block_tables)):
            return np.fromiter(rows, dtype=np.int32, count=len(rows))
        for i, (row, table) in enumerate(zip(rows, block_tables, strict=True)):
            if row < 0 or tables[row] is not table or known[row] != len(table):
                rows[i] = self._update(seq_ids[i], row, table, batch)
        return np.fromiter(rows, dtype=np.int32, count=len(rows))

    def grow(self, row: int) -> None:
        """Adds the new blocks of a row's sequence."""
        table = self._tables[row]
        assert table is not None
        self._write(row, table)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees the rows of these sequences; unknown ones are fine."""
        for seq_id in seq_ids:
            row = self._row_of.pop(seq_id, None)
            if row is not None:
                self._tables[row] = None
                self._free.append(row)

    def forget_all(self) -> None:
        """Frees all rows: a step that raised may have taken cells that never reached the device."""
        self.forget(list(self._row_of))
        self._written.clear()

    def take_written(self) -> tuple[IntArray, IntArray]:
        """Returns the cells of the flat table that the device lacks, and what they hold."""
        written, self._written = self._written, []
        if not written:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        _, num_rows, width = self.table.shape
        cells = np.concatenate(
            [
                np.arange(a, b, dtype=np.int32) + np.int32((group * num_rows + row) * width)
                for row, a, b in written
                for group in range(self._num_groups)
            ]
        )
        return cells, self.table.reshape(-1)[cells]

    def _update(self, seq_id: int, row: int, table: View[int], batch: Set[int]) -> int:
        if row < 0:
            row = self._row_of[seq_id] = self._free_row(batch)
        if self._tables[row] is not table:
            self._tables[row] = table
            self._known[row] = 0
        self._write(row, table)
        return row

    def _write(self, row: int, table: View[int]) -> None:
        first, self._known[row] = self._known[row], len(table)
        begin, end = (known // self._num_groups for known in (first, len(table)))
        if end > self.table.shape[2]:
            self._widen(end)
        for group in range(self._num_groups):
            self.table[group, row, begin:end] = table[first + group :: self._num_groups]
        self.num_blocks[row] = end
        if not self.is_shared:
            self._written.append((row, begin, end))

    def _free_row(self, batch: Set[int]) -> int:
        if not self._free:
            self.forget([seq_id for seq_id in self._row_of if seq_id not in batch])
        if not self._free:
            self._add_rows(max(1, len(self._tables)))
        return self._free.pop()

    def _add_rows(self, count: int) -> None:
        old = len(self._tables)
        self._resize(old + count, self.table.shape[2])
        self._tables += [None] * count
        self._known += [0] * count
        self.num_blocks = np.concatenate([self.num_blocks, np.zeros(count, dtype=np.int32)])
        self._free += range(old + count - 1, old - 1, -1)

    def _widen(self, width: int) -> None:
        self._resize(len(self._tables), 1 << (width - 1).bit_length())

    def _resize(self, num_rows: int, width: int) -> None:
        """Makes larger tables; a step that is on the device continues with the old one."""
        table = np.zeros((self._num_groups, num_rows, width), dtype=np.int32)
        table[:, : self.table.shape[1], : self.table.shape[2]] = self.table
        there = torch.from_numpy(table) if self.is_shared else to_device(table, self._device)
        self.table, self.there = table, there  # both or none: the device may have no room


class Staging:
    """Copies of a step's arrays to the device: one transfer, out of pinned memory that is kept."""

    _RING = 3  # with lookahead two steps may not have started to read theirs

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._next = 0
        self._buffers: list[Tensor] = []
        self._arrays: list[IntArray] = []
        self._copied: list[torch.cuda.Event] = []

    def copy(self, arrays: View[IntArray]) -> list[Tensor]:
        """Returns the int32 arrays [n] as tensors on the device, without waiting."""
        size = sum(map(len, arrays))
        if not self._is_cuda:
            there = torch.from_numpy(np.concatenate(arrays)).to(self._device)
        else:
            there = self._transfer(arrays, size)
        tensors, begin = [], 0
        for array in arrays:
            tensors.append(there[begin : begin + len(array)])
            begin += len(array)
        return tensors

    def _transfer(self, arrays: View[IntArray], size: int) -> Tensor:
        i, self._next = self._next, (self._next + 1) % self._RING
        if len(self._buffers) < self._RING:
            self._buffers.append(torch.empty(0, dtype=torch.int32))
            self._arrays.append(self._buffers[i].numpy())
            self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        else:
            self._copied[i].synchronize()  # three steps ago: it is there
        if len(self._arrays[i]) < size:
            capacity = 1 << (size - 1).bit_length()
            self._buffers[i] = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
            self._arrays[i] = self._buffers[i].numpy()
        np.concatenate(arrays, out=self._arrays[i][:size])
        there = self._buffers[i][:size].to(self._device, non_blocking=True)
        self._copied[i].record()
        return there

"""A step's ragged batch as the kernels' attention reads it."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.model.attention.base import AttentionMetadata
from worker.model.cpu.library import ATTENTION_ROWS, Ragged


def ragged(metadata: AttentionMetadata, work: Tensor) -> Ragged:
    """The kernels' view of both, which must outlive it."""
    return Ragged(
        sequences=len(metadata.query_lens),
        cu_q=metadata.cu_q.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        table=metadata.block_table.data_ptr(),
        table_stride=metadata.block_table.stride(0),
        work=work.data_ptr(),
        num_work=work.shape[0],
    )


def work_list(query_lens: tuple[int, ...], group: int) -> Tensor:
    """[items, 2] int32: sequence, and the first of the ATTENTION_ROWS rows of queries times heads
    of a group that one item computes."""
    return _tensor(
        (sequence, start)
        for sequence, length in enumerate(query_lens)
        for start in range(0, length * group, ATTENTION_ROWS)
    )


def rows_work(query_lens: tuple[int, ...], group: int, rows: Sequence[int]) -> Tensor:
    """The items of `rows`, places in the batch in their order; of each sequence from its first row
    to its last."""
    items, at = [], 0
    ends = zip(query_lens, itertools.accumulate(query_lens), strict=True)
    for sequence, (length, end) in enumerate(ends):
        past = bisect_left(rows, end, lo=at)
        if past > at:
            first, last = (row - (end - length) for row in (rows[at], rows[past - 1]))
            items += [
                (sequence, start)
                for start in range(first * group, (last + 1) * group, ATTENTION_ROWS)
            ]
        at = past
    return _tensor(items)


def _tensor(items: Iterable[tuple[int, int]]) -> Tensor:
    return torch.from_numpy(np.array(list(items), dtype=np.int32).reshape(-1, 2))

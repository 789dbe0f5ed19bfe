"""A step's ragged batch as the kernels' attention reads it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import Tensor

from worker.model.attention.base import AttentionMetadata
from worker.model.cpu.library import ATTENTION_ROWS, Ragged


def ragged(metadata: AttentionMetadata, work: Tensor) -> Ragged:
    """The kernels' view of both, which must outlive it."""
    return Ragged(
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


def last_token_work(query_lens: tuple[int, ...], group: int, rows: Collection[int]) -> Tensor:
    """The items of those of `rows`, places in the batch, that end a sequence."""
    ends = zip(query_lens, itertools.accumulate(query_lens), strict=True)
    return _tensor(
        (sequence, start)
        for sequence, (length, end) in enumerate(ends)
        if end - 1 in rows
        for start in range((length - 1) * group, length * group, ATTENTION_ROWS)
    )


def _tensor(items: Iterable[tuple[int, int]]) -> Tensor:
    return torch.from_numpy(np.array(list(items), dtype=np.int32).reshape(-1, 2))

"""Attention by the compiled CPU kernels, straight from the block table."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.model.attention.base import AttentionMetadata
from worker.model.cpu.library import ATTENTION_BLOCK, ATTENTION_ROWS, NativeKernels, Ragged
from worker.model.kv_pool import KVCachePool


class NativeAttention:
    """An AttentionBackend over a pool of bfloat16 blocks of 16 tokens on the CPU.

    Within a block each key head has its own 16 * head_dim places, in the order that kernels.cpp
    describes: nobody else can read them, and a block may still be copied as a whole.
    """

    def __init__(self, pool: KVCachePool, kernels: NativeKernels) -> None:
        if pool.block_size != ATTENTION_BLOCK or pool.storage.dtype != torch.bfloat16:
            raise ValueError(f"the pool must have blocks of {ATTENTION_BLOCK} bfloat16 tokens")
        self._kernels = kernels
        self._layers = [
            (keys.data_ptr(), values.data_ptr())
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._pool = pool  # keeps the memory behind these addresses
        self._block_stride = pool.storage.stride(0)
        self._num_kv_heads = pool.keys[0].shape[2]
        self._head_dim = pool.keys[0].shape[3]
        self._scale = self._head_dim**-0.5
        self._metadata: AttentionMetadata | None = None
        self._ragged: dict[int, tuple[Ragged, Tensor]] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._ragged = {}

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        metadata = self._metadata
        assert metadata is not None, "forward comes after prepare"
        num_tokens, num_heads = q.shape[0], q.shape[1]
        if num_heads not in self._ragged:
            group = num_heads // self._num_kv_heads
            work = work_list(metadata.query_lens, group)
            self._ragged[num_heads] = (ragged(metadata, work), work)
        there, _ = self._ragged[num_heads]
        keys, values = self._layers[layer]
        self._kernels.kv_store(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            keys,
            values,
            self._block_stride,
            metadata.slots.data_ptr(),
            num_tokens,
            self._num_kv_heads,
            self._head_dim,
        )
        self._kernels.paged_attention(
            q.data_ptr(),
            q.stride(0),
            keys,
            values,
            self._block_stride,
            out.data_ptr(),
            there,
            num_heads,
            self._num_kv_heads,
            self._head_dim,
            self._scale,
        )


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
    items = [
        (sequence, start)
        for sequence, length in enumerate(query_lens)
        for start in range(0, length * group, ATTENTION_ROWS)
    ]
    return torch.from_numpy(np.array(items, dtype=np.int32).reshape(-1, 2))

"""The compiled CPU kernels' attention as an AttentionBackend: one call a layer.

For steps whose products are not the kernels' own. NativeStack, which does all layers in one call,
is compared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.model.attention.base import AttentionMetadata
from worker.model.cpu.library import ATTENTION_BLOCK, NativeKernels, Ragged
from worker.model.cpu.native_stack import ragged, work_list
from worker.model.kv_cache import KVCachePool


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

"""The compiled kernels as a DecoderStack and as an AttentionBackend.

NativeStack computes all layers in one call, without Python in between. NativeAttention computes the
attention of one layer, for steps whose products are not the kernels'; NativeStack is compared with
it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.model.base import AttentionMetadata, LayerScores
from worker.model.cpu.library import (
    ATTENTION_BLOCK,
    ATTENTION_ROWS,
    NO_WINDOW,
    Batch,
    Layer,
    NativeKernels,
    Ragged,
    Stack,
    Weight,
)
from worker.model.cpu.native_ops import NativeProduct, ProductBuffers, Workspace
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, DecoderLayer
from worker.model.layers.linear import Linear
from worker.model.layers.ops import Norm


class NativeStack:
    """A DecoderStack over a model whose layers use NativeOps.

    Its results are those of LayerByLayer with these ops and NativeAttention, bit for bit.
    """

    def __init__(self, model: CausalLM, pool: KVCachePool, kernels: NativeKernels) -> None:
        config = model.config
        layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        assert len(layers) == config.num_layers, "models are made of DecoderLayers"
        self._kernel = kernels.decoder_stack
        self._settle = kernels.settle
        self._alive = (model, pool)  # keeps the memory of the addresses
        self._group = config.num_heads // config.num_kv_heads
        self._stack = Stack(
            layers=(Layer * len(layers))(
                *(_layer(model, layer, pool, index) for index, layer in enumerate(layers))
            ),
            num_layers=len(layers),
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            block_stride=pool.storage.stride(0),
            embedding=model.embed_tokens.weight.data_ptr(),
            final_norm=model.norm.weight.data_ptr(),
            embedding_scale=model.embed_tokens.scale,
            norm_offset=float(config.norms_add_one),
            norm_eps=config.rms_norm_eps,
            attention_scale=config.attention_scale,
        )
        # From how many rows on each layer has a product that uses a copy of its weight; 0: never.
        from_rows = [_copy_rows(layer) for layer in layers]
        self.copy_rows = max(from_rows) if all(from_rows) else 0
        first = self._stack.layers[0]
        attended = config.num_heads * config.head_dim
        self._widest = max(first.qkv.k, attended, first.down.k)
        self._scratch = ProductBuffers(kernels)
        self._buffers = {
            name: Workspace(width, kernels)
            for name, width in {
                "x": config.hidden_size,
                "normed": config.hidden_size,
                "qkv": first.qkv.n,
                "attended": attended,
                "inner": first.gate_up.n,
                "delta": config.hidden_size,
            }.items()
        }

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        num_tokens = metadata.num_tokens
        tables = whole_tables(metadata)
        work = work_list(metadata.query_lens, self._group)
        last_work = rows_work(metadata.query_lens, self._group, rows.tolist())
        buffers = {name: space.rows(num_tokens) for name, space in self._buffers.items()}
        batch = Batch(
            tokens=num_tokens,
            ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=metadata.slots.data_ptr(),
            ragged=ragged(metadata, tables, work),
            rows=rows.data_ptr(),
            num_rows=len(rows),
            ragged_rows=ragged(metadata, tables, last_work),
            scratch=self._scratch.of(num_tokens, self._widest),
            **{name: rows.data_ptr() for name, rows in buffers.items()},
        )
        self._kernel(self._stack, batch)
        return buffers["normed"][: len(rows)]

    def __del__(self) -> None:
        self._settle()  # a late thread may still read the model and the cache


def _layer(model: CausalLM, layer: DecoderLayer, pool: KVCachePool, index: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = attention.q_norm, attention.k_norm
    rope = model.local_rope if attention.kind.is_local else model.rope
    cosines, sines = rope.tables
    return Layer(
        attention_norm=_address(layer.input_layernorm.norm),
        attention_output_norm=_address(layer.attention_output_norm),
        mlp_norm=_address(layer.mlp_norm),
        mlp_output_norm=_address(layer.mlp_output_norm),
        query_norm=_address(query_norm.norm if query_norm is not None else None),
        key_norm=_address(key_norm.norm if key_norm is not None else None),
        qkv=_weight(attention.qkv),
        output=_weight(attention.output),
        gate_up=_weight(mlp.gate_up),
        down=_weight(mlp.down),
        keys=pool.keys[index].data_ptr(),
        values=pool.values[index].data_ptr(),
        cosines=cosines.data_ptr(),
        sines=sines.data_ptr(),
        window=attention.kind.window or NO_WINDOW,
        group=pool.groups.of_layers[index],
    )


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _copy_rows(layer: DecoderLayer) -> int:
    attention, mlp = layer.self_attn, layer.mlp
    products = map(_product, (attention.qkv, attention.output, mlp.gate_up, mlp.down))
    return min((product.many_rows for product in products if product.many_rows), default=0)


def _weight(linear: Linear) -> Weight:
    return _product(linear).weight


def _product(linear: Linear) -> NativeProduct:
    product = linear.product
    assert isinstance(product, NativeProduct), "the model uses NativeOps"
    return product


def whole_tables(metadata: AttentionMetadata) -> Tensor:
    """Returns the block tables, those of several groups in one piece, which the kernels copy."""
    tables = metadata.block_tables
    return tables if len(tables) == 1 else tables.contiguous()


def ragged(metadata: AttentionMetadata, tables: Tensor, work: Tensor) -> Ragged:
    """Returns the kernels' view of all three, which must outlive it. `tables` are the
    `whole_tables` of `metadata`; `work` [items, 2] is int32."""
    return Ragged(
        sequences=len(metadata.query_lens),
        cu_q=metadata.cu_q.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        table=tables.data_ptr(),
        table_stride=tables.stride(1),
        groups=len(tables),
        group_stride=tables.stride(0),
        work=work.data_ptr(),
        num_work=work.shape[0],
    )


def work_list(query_lens: tuple[int, ...], group: int) -> Tensor:
    """Returns the items of a step's attention, [items, 2] int32.

    Each is a sequence and the first of the ATTENTION_ROWS rows, of queries times heads of a group,
    that the item computes.
    """
    return _tensor(
        (sequence, start)
        for sequence, length in enumerate(query_lens)
        for start in range(0, length * group, ATTENTION_ROWS)
    )


def rows_work(query_lens: tuple[int, ...], group: int, rows: Sequence[int]) -> Tensor:
    """Returns the items of `rows`, ascending positions in the batch, as [items, 2] int32.

    For each sequence, from its first row to its last.
    """
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
    """Returns the pairs as [items, 2] int32."""
    return torch.from_numpy(np.array(list(items), dtype=np.int32).reshape(-1, 2))


class NativeAttention:
    """An AttentionBackend over a pool of bfloat16 blocks of 16 tokens on the CPU.

    Within a block each key head has its own 16 * head_dim places, in the order that kernels.cpp
    describes: no other code can read them, and a block may still be copied as a whole.
    """

    def __init__(
        self,
        pool: KVCachePool,
        kernels: NativeKernels,
        layers: Sequence[LayerScores] | None = None,
    ) -> None:
        """Raises ValueError for a pool of other blocks, and for layers that the kernels do not
        compute; without `layers` every one is LayerScores()."""
        if pool.block_size != ATTENTION_BLOCK or pool.storage.dtype != torch.bfloat16:
            raise ValueError(f"the pool must have blocks of {ATTENTION_BLOCK} bfloat16 tokens")
        self._kernels = kernels
        self._layers = [
            (keys.data_ptr(), values.data_ptr())
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._pool = pool  # keeps the memory of these addresses
        self._block_stride = pool.storage.stride(0)
        self._num_kv_heads = pool.keys[0].shape[2]
        self._head_dim = pool.keys[0].shape[3]
        scores = (LayerScores(),) * len(pool.keys) if layers is None else tuple(layers)
        if any(layer.softcap is not None or layer.reach.chunk is not None for layer in scores):
            raise ValueError("the kernels compute windows, but no chunks and no soft caps")
        self._scores = [
            (
                self._head_dim**-0.5 if layer.scale is None else layer.scale,
                layer.reach.window or NO_WINDOW,
            )
            for layer in scores
        ]
        self._metadata: AttentionMetadata | None = None
        self._tables = torch.empty(0)
        self._ragged: dict[int, tuple[Ragged, Tensor]] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._tables = whole_tables(metadata)
        self._ragged = {}

    def step(self, num_heads: int) -> tuple[AttentionMetadata, Ragged]:
        """Returns the prepared layers, and the kernels' view of them for that many heads."""
        metadata = self._metadata
        assert metadata is not None, "step comes after prepare"
        if num_heads not in self._ragged:
            work = work_list(metadata.query_lens, num_heads // self._num_kv_heads)
            self._ragged[num_heads] = (ragged(metadata, self._tables, work), work)
        return metadata, self._ragged[num_heads][0]

    def lend(self, stack: Stack, own: Layer, layer: int) -> None:
        """Writes where `layer` keeps keys and values, and how it attends."""
        own.keys, own.values = self._layers[layer]
        own.group = self._pool.groups.of_layers[layer]
        stack.attention_scale, own.window = self._scores[layer]
        stack.block_stride = self._block_stride

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        metadata = self._metadata
        assert metadata is not None, "store comes after prepare"
        keys, values = self._layers[layer]
        self._kernels.kv_store(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            keys,
            values,
            self._block_stride,
            metadata.slots[self._pool.groups.of_layers[layer]].data_ptr(),
            k.shape[0],
            self._num_kv_heads,
            self._head_dim,
        )

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        num_heads = q.shape[1]
        keys, values = self._layers[layer]
        self._kernels.paged_attention(
            q.data_ptr(),
            q.stride(0),
            keys,
            values,
            self._block_stride,
            out.data_ptr(),
            self.step(num_heads)[1],
            self._pool.groups.of_layers[layer],
            num_heads,
            self._num_kv_heads,
            self._head_dim,
            *self._scores[layer],
        )

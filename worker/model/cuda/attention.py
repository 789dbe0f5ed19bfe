"""TritonAttention: an AttentionBackend of this project's Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from worker.model.base import FP8, AttentionMetadata, LayerScores
from worker.model.cuda.kernels.chunk_attention import chunk_attention
from worker.model.cuda.kernels.decode_attention import decode_attention, merge_splits
from worker.model.cuda.layers import store_keys_and_values
from worker.model.kv_cache import KVCachePool

_MIN_ROWS = 16  # of a matrix operand
_MAX_SPLITS = 32
_PROGRAMS_A_PROCESSOR = 4  # that keep its memory pipes full


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work: rows and keys of a tile, warps, stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int


class TritonAttention:
    """Attends over `pool`, whose layers may differ. Nothing here waits for the device."""

    def __init__(self, pool: KVCachePool, layers: Sequence[LayerScores] | None = None) -> None:
        """Without `layers` every one is LayerScores()."""
        self._pool = pool
        if layers is None:
            layers = (LayerScores(),) * len(pool.keys)
        self._layers = [
            _Layer.of(keys, values, scores)
            for keys, values, scores in zip(pool.keys, pool.values, layers, strict=True)
        ]
        self._num_processors = _num_processors(pool.storage.device)
        self._is_narrow = pool.storage.dtype is FP8 and _lacks_wgmma(pool.storage.device)
        self._metadata: AttentionMetadata | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        assert self._metadata is not None, "store comes after prepare"
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        store_keys_and_values(k, v, keys, values, self._metadata.slots)

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        """Attends as AttentionBackend defines; the last dimension of q is contiguous. `sinks`
        [heads]: scores of a key without a value."""
        metadata, this = self._metadata, self._layers[layer]
        assert metadata is not None, "attend comes after prepare"
        decodes = metadata.num_decodes
        if decodes:
            self._decode(this, metadata, q[:decodes], out[:decodes], sinks)
        if len(metadata.query_lens) > decodes:
            self._chunks(this, metadata, q, out, sinks)

    def _decode(
        self,
        layer: _Layer,
        metadata: AttentionMetadata,
        q: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attends with the sequences of one query each; q and out are their rows."""
        num_rows, heads, value_dim = out.shape
        group = heads // layer.kv_heads
        tiles = decode_tiles(group, layer.key_width, q.dtype, is_narrow=self._is_narrow)
        splits = num_splits(num_rows * layer.kv_heads, self._num_processors)
        partial = best = total = out  # not read where there is one split
        if splits > 1:
            shape = (num_rows, heads, splits)
            partial = torch.empty((*shape, value_dim), dtype=torch.float32, device=out.device)
            best, total = torch.empty((2, *shape), dtype=torch.float32, device=out.device)
        decode_attention[(num_rows, layer.kv_heads, splits)](
            q,
            layer.keys,
            layer.values,
            out,
            partial,
            best,
            total,
            metadata.seq_lens,
            metadata.block_table,
            out if sinks is None else sinks,
            num_splits=splits,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            out_stride=out.stride(0),
            table_stride=metadata.block_table.stride(0),
            HEADS=heads,
            GROUP=group,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            IS_SPLIT=splits > 1,
            HAS_SINKS=sinks is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **layer.arguments,
        )
        if splits > 1:
            merge_splits[(num_rows, heads)](
                out,
                partial,
                best,
                total,
                splits,
                out.stride(0),
                HEADS=heads,
                VALUE_DIM=value_dim,
                VALUE_WIDTH=layer.value_width,
                MAX_SPLITS=_MAX_SPLITS,
                num_warps=4,
            )

    def _chunks(
        self,
        layer: _Layer,
        metadata: AttentionMetadata,
        q: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attends with the chunks of prompts, which come after the decodes."""
        decodes, group = metadata.num_decodes, q.shape[1] // layer.kv_heads
        tiles = chunk_tiles(group, layer.key_width, q.dtype, is_narrow=self._is_narrow)
        num_chunks = len(metadata.query_lens) - decodes
        # In a graph it is not known how many of the tokens are decodes.
        num_tiles = len(q) // (tiles.rows // group) + num_chunks
        table = metadata.block_table[decodes:]
        chunk_attention[(layer.kv_heads, num_tiles)](
            q,
            layer.keys,
            layer.values,
            out,
            metadata.cu_q[decodes:],
            metadata.seq_lens[decodes:],
            table,
            out if sinks is None else sinks,
            num_chunks=num_chunks,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            out_stride=out.stride(0),
            table_stride=table.stride(0),
            GROUP=group,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            HAS_SINKS=sinks is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **layer.arguments,
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's part of the pool, and what the kernels get for it at every step."""

    keys: Tensor
    values: Tensor
    kv_heads: int
    key_width: int  # of a tile
    value_width: int
    arguments: dict[str, Any]  # of both kernels, by name

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, scores: LayerScores) -> _Layer:
        """Returns that of keys [blocks, block_size, kv_heads, key_dim] and values."""
        reach, key_dim, value_dim = scores.reach, keys.shape[3], values.shape[3]
        key_width, value_width = _width(key_dim), _width(value_dim)
        # The reference formula, in float32, is not rounded to TF32.
        precision = "tf32" if keys.dtype.itemsize == 2 else "ieee"
        arguments = {
            "scale": key_dim**-0.5 if scores.scale is None else scores.scale,
            "softcap": scores.softcap or 0.0,
            "window": reach.window or 0,
            "chunk": reach.chunk or 0,
            "key_block_stride": keys.stride(0),
            "key_stride": keys.stride(1),
            "value_block_stride": values.stride(0),
            "value_stride": values.stride(1),
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "KEY_WIDTH": key_width,
            "VALUE_WIDTH": value_width,
            "BLOCK_SIZE": keys.shape[1],
            "HAS_SOFTCAP": scores.softcap is not None,
            "HAS_WINDOW": reach.window is not None,
            "HAS_CHUNK": reach.chunk is not None,
            "PRECISION": precision,
        }
        return cls(keys, values, keys.shape[2], key_width, value_width, arguments)


def decode_tiles(group: int, width: int, dtype: torch.dtype, *, is_narrow: bool = False) -> Tiles:
    """Returns the tiles of the kernel for single queries of `group` heads, `width` wide.

    `is_narrow`: with half of the keys.
    """
    rows = max(_MIN_ROWS, triton.next_power_of_2(group))
    is_wide = width * dtype.itemsize > 256
    keys = (32 if is_wide else 64) // (2 if is_narrow else 1)
    if dtype.itemsize == 4:  # the matrix units have no float32: products are in registers
        return Tiles(rows, keys // 2, 4, 3)
    return Tiles(rows, keys, 2 if rows == _MIN_ROWS else 4, 3)


def chunk_tiles(group: int, width: int, dtype: torch.dtype, *, is_narrow: bool = False) -> Tiles:
    """Returns the tiles of the kernel for chunks of prompts, as `decode_tiles` does."""
    is_wide = width * dtype.itemsize > 256
    rows = max(64 if is_wide else 128, triton.next_power_of_2(group))
    keys = (32 if is_wide else 64) // (2 if is_narrow else 1)
    if dtype.itemsize == 4:
        rows, keys = max(32, triton.next_power_of_2(group)), keys // 2
    return Tiles(rows, keys, 8, 2)


def num_splits(num_programs: int, num_processors: int) -> int:
    """Returns into how many parts the keys of each sequence are cut, so that all multiprocessors
    have work: a function of the batch's size alone, as in a CUDA graph."""
    wanted = -(-_PROGRAMS_A_PROCESSOR * num_processors // num_programs)
    return min(_MAX_SPLITS, int(triton.next_power_of_2(wanted)))


def _width(dim: int) -> int:
    """Returns the columns of a tile for heads of `dim`: what `tl.dot` takes."""
    return max(_MIN_ROWS, int(triton.next_power_of_2(dim)))


def _lacks_wgmma(device: torch.device) -> bool:
    """Returns whether operands of `tl.dot` are in registers, of which FP8 needs twice as many: as
    it is and widened."""
    # 9 is Hopper, 10 the data centre's Blackwell; the others, of 12, have none.
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # in the interpreter
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count

"""TritonAttention: an AttentionBackend of this project's Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.model.attention.base import AttentionMetadata, LayerScores
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
        self._layers = (LayerScores(),) * len(pool.keys) if layers is None else tuple(layers)
        self._metadata: AttentionMetadata | None = None
        self._num_processors = _num_processors(pool.storage.device)
        # float32 operands stay float32: what is compared with the formula is not rounded to TF32.
        self._precision = "ieee" if pool.storage.dtype is torch.float32 else "tf32"

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Computes one layer as AttentionBackend says. `sinks` [heads]: scores of a key without a
        value."""
        assert self._metadata is not None, "forward comes after prepare"
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        store_keys_and_values(k, v, keys, values, self._metadata.slots)
        self.attend(layer, q, out, sinks)

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        """Fills `out` [T, heads, value_dim] for q [T, heads, key_dim], whose last dimension is
        contiguous; the keys and values of this step have been stored."""
        metadata = self._metadata
        assert metadata is not None, "attend comes after prepare"
        decodes = metadata.num_decodes
        if decodes:
            self._decode(layer, q[:decodes], out[:decodes], sinks)
        if len(metadata.query_lens) > decodes:
            self._chunks(layer, q, out, sinks)

    def _decode(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        metadata = self._metadata
        assert metadata is not None
        num_rows, heads, value_dim = out.shape
        common = self._arguments(layer, q, out, sinks)
        kv_heads = self._pool.keys[layer].shape[2]
        tiles = decode_tiles(common["GROUP"], common["KEY_WIDTH"], q.dtype)
        splits = num_splits(num_rows * kv_heads, self._num_processors)
        if splits == 1:
            partial = best = total = out
        else:
            shape = (num_rows, heads, splits)
            partial = torch.empty((*shape, value_dim), dtype=torch.float32, device=out.device)
            best, total = torch.empty((2, *shape), dtype=torch.float32, device=out.device)
        decode_attention[(num_rows, kv_heads, splits)](
            q,
            self._pool.keys[layer],
            self._pool.values[layer],
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
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            IS_SPLIT=splits > 1,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **common,
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
                VALUE_WIDTH=common["VALUE_WIDTH"],
                MAX_SPLITS=_MAX_SPLITS,
                num_warps=4,
            )

    def _chunks(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        metadata = self._metadata
        assert metadata is not None
        decodes = metadata.num_decodes
        common = self._arguments(layer, q, out, sinks)
        tiles = chunk_tiles(common["GROUP"], common["KEY_WIDTH"], q.dtype)
        num_chunks = len(metadata.query_lens) - decodes
        num_tokens = metadata.num_tokens - decodes
        num_tiles = num_tokens // (tiles.rows // common["GROUP"]) + num_chunks
        table = metadata.block_table[decodes:]
        chunk_attention[(self._pool.keys[layer].shape[2], num_tiles)](
            q,
            self._pool.keys[layer],
            self._pool.values[layer],
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
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **common,
        )

    def _arguments(
        self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None
    ) -> dict[str, int | float | bool | str]:
        """Returns what both kernels get, by name."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        scores, reach = self._layers[layer], self._layers[layer].reach
        key_dim, value_dim = keys.shape[3], values.shape[3]
        return {
            "scale": key_dim**-0.5 if scores.scale is None else scores.scale,
            "softcap": scores.softcap or 0.0,
            "window": reach.window or 0,
            "chunk": reach.chunk or 0,
            "key_block_stride": keys.stride(0),
            "key_stride": keys.stride(1),
            "value_block_stride": values.stride(0),
            "value_stride": values.stride(1),
            "GROUP": q.shape[1] // keys.shape[2],
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "KEY_WIDTH": _width(key_dim),
            "VALUE_WIDTH": _width(value_dim),
            "BLOCK_SIZE": self._pool.block_size,
            "HAS_SOFTCAP": scores.softcap is not None,
            "HAS_WINDOW": reach.window is not None,
            "HAS_CHUNK": reach.chunk is not None,
            "HAS_SINKS": sinks is not None,
            "PRECISION": self._precision,
        }


def decode_tiles(group: int, width: int, dtype: torch.dtype) -> Tiles:
    """Returns the tiles of the kernel for single queries of `group` heads, `width` wide."""
    rows = max(_MIN_ROWS, triton.next_power_of_2(group))
    is_wide = width * dtype.itemsize > 256
    return Tiles(rows, 32 if is_wide else 64, 2 if rows == _MIN_ROWS else 4, 3)


def chunk_tiles(group: int, width: int, dtype: torch.dtype) -> Tiles:
    """Returns the tiles of the kernel for chunks of prompts."""
    is_wide = width * dtype.itemsize > 256
    rows = max(64 if is_wide else 128, triton.next_power_of_2(group))
    return Tiles(rows, 32 if is_wide else 64, 4 if is_wide else 8, 2)


def num_splits(num_programs: int, num_processors: int) -> int:
    """Returns into how many parts the keys of each sequence are cut, so that all multiprocessors
    have work: a function of the batch's size alone, as in a CUDA graph."""
    wanted = -(-_PROGRAMS_A_PROCESSOR * num_processors // num_programs)
    return min(_MAX_SPLITS, triton.next_power_of_2(wanted))


def _width(dim: int) -> int:
    """Returns the columns of a tile for heads of `dim`: what `tl.dot` takes."""
    return max(_MIN_ROWS, triton.next_power_of_2(dim))


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # in the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count

"""TritonAttention: an AttentionBackend of this project's Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from worker.model.base import FP8, AttentionMetadata, LayerScores
from worker.model.cuda.kernels.attention import attention, merge_parts
from worker.model.cuda.kernels.attention_plan import (
    PROGRAM_FIELDS,
    UNIT_FIELDS,
    plan_attention,
)
from worker.model.cuda.kernels.chunk_attention import chunk_attention
from worker.model.cuda.layers import store_keys_and_values
from worker.model.kv_cache import KVCachePool

_MIN_ROWS = 16  # of a matrix operand
_MERGED_KEYS = 512  # that a program scans in the time that a division of keys costs
_PLANNED_AT_ONCE = 1024  # units, or programs
_INVARIANT_KEYS = 512  # of a step that is computed by itself
_KEPT_STEPS = 8  # for each program


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work: rows and keys of a tile, warps, stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def programs(self) -> int:
        """Programs that are resident on a multiprocessor: registers bound them."""
        return max(1, 8 // self.warps)


class TritonAttention:
    """Attends over `pool`, whose layers may differ. Nothing here waits for the device."""

    def __init__(
        self,
        pool: KVCachePool,
        layers: Sequence[LayerScores] | None = None,
        *,
        is_invariant: bool = False,
    ) -> None:
        """Without `layers` every one is LayerScores(). `is_invariant`: the output of a query has
        the same bits in every batch, decode or chunk."""
        self._pool = pool
        if layers is None:
            layers = (LayerScores(),) * len(pool.keys)
        self._layers = [
            _Layer.of(keys, values, scores, kv_group)
            for keys, values, scores, kv_group in zip(
                pool.keys, pool.values, layers, pool.groups.of_layers, strict=True
            )
        ]
        self._num_processors = _num_processors(pool.storage.device)
        # AMD's compiler spills registers in wide tiles, and NVIDIA's for 12 in those of chunks.
        device, is_fp8 = pool.storage.device, pool.storage.dtype is FP8
        self._is_narrow = torch.version.hip is not None or (is_fp8 and _lacks_wgmma(device))
        self._has_narrow_chunks = self._is_narrow or _capability(device) == 12
        self._is_invariant = is_invariant
        self._metadata: AttentionMetadata | None = None
        self._plans: dict[object, _Plan] = {}  # of this step, as the next
        self._even: dict[object, bool] = {}  # see _is_even
        self._scratch: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._plans = {}
        self._even = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        assert self._metadata is not None, "store comes after prepare"
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        slots = self._metadata.slots[self._layers[layer].kv_group]
        store_keys_and_values(k, v, keys, values, slots)

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        """Attends as AttentionBackend defines; the last dimension of q is contiguous. `sinks`
        [heads]: scores of a key without a value."""
        metadata, this = self._metadata, self._layers[layer]
        assert metadata is not None, "attend comes after prepare"
        shape = q.shape[1] // this.kv_heads, this.key_width, q.dtype
        decodes, chunks = metadata.num_decodes, len(metadata.query_lens) - metadata.num_decodes
        if self._is_invariant:
            self._attend(this, invariant_tiles(*shape), _Rows(0, decodes, chunks), q, out, sinks)
            return
        if decodes:
            tiles = decode_tiles(*shape, is_narrow=self._is_narrow)
            self._attend(this, tiles, _Rows(0, decodes, 0), q, out, sinks)
        if chunks:
            tiles = chunk_tiles(*shape, is_narrow=self._has_narrow_chunks)
            key = this.kv_heads, shape[0], this.window, this.chunk, tiles
            if key not in self._even:
                self._even[key] = self._is_even(this, metadata, tiles, shape[0])
            if self._even[key]:
                self._attend_whole(this, tiles, q, out, sinks)
            else:
                self._attend(this, tiles, _Rows(decodes, 0, chunks), q, out, sinks)

    def _is_even(
        self, layer: _Layer, metadata: AttentionMetadata, tiles: Tiles, group: int
    ) -> bool:
        """Returns whether chunks need no division of keys: no tile takes much longer than an equal
        share of all. In a graph, whose chunks are empty here, the host does not know: False."""
        if not all(metadata.query_lens[metadata.num_decodes :]):
            return False
        tile_tokens = tiles.rows // group
        longest = total = 0
        for new, end in zip(
            metadata.query_lens[metadata.num_decodes :],
            metadata.context_lens[metadata.num_decodes :],
            strict=True,
        ):
            reach = min([end, *(one + tile_tokens for one in (layer.window, layer.chunk) if one)])
            longest = max(longest, reach)
            total += -(-new // tile_tokens) * min(reach, end - new // 2)
        share = layer.kv_heads * total // self._num_processors
        return longest <= share + _MERGED_KEYS

    def _attend_whole(
        self, layer: _Layer, tiles: Tiles, q: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        """Attends with chunks, each tile by one program, the longest ones first."""
        metadata = self._metadata
        assert metadata is not None
        decodes, group = metadata.num_decodes, q.shape[1] // layer.kv_heads
        num_chunks = len(metadata.query_lens) - decodes
        num_tiles = len(q) // (tiles.rows // group) + num_chunks
        table = metadata.block_tables[layer.kv_group, decodes:]
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

    def _attend(
        self,
        layer: _Layer,
        tiles: Tiles,
        rows: _Rows,
        q: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Attends with the queries of some of the sequences."""
        assert self._metadata is not None
        heads, value_dim = out.shape[1:]
        group = heads // layer.kv_heads
        num_programs = self._num_processors * tiles.programs
        num_slots = num_programs * (_KEPT_STEPS if self._is_invariant else 2)
        plan = self._plan(layer, tiles, group, rows, num_programs, num_slots)
        scratch = self._scratch_of((num_slots, tiles.rows, value_dim), out.device)
        table = self._metadata.block_tables[layer.kv_group, rows.first :]
        common = {
            "KV_HEADS": layer.kv_heads,
            "GROUP": group,
            "BLOCK_M": tiles.rows,
            "HAS_SINKS": sinks is not None,
            "enable_fp_fusion": not self._is_invariant,
        }
        attention[(num_programs,)](
            q,
            layer.keys,
            layer.values,
            out,
            *scratch,
            plan.units,
            plan.programs,
            table,
            out if sinks is None else sinks,
            max_units=plan.max_units,
            num_programs=num_programs,
            q_stride=q.stride(0),
            q_head_stride=q.stride(1),
            out_stride=out.stride(0),
            table_stride=table.stride(0),
            BLOCK_N=tiles.keys,
            STEP=self._step_keys(tiles),
            KEEPS_STEPS=self._is_invariant,
            HAS_UNMASKED=rows.chunks > 0 and not self._is_invariant and not layer.has_reach,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **common,
            **layer.arguments,
        )
        most_rows = tiles.rows if rows.chunks else group
        rows_at_once = min(16, triton.next_power_of_2(most_rows))
        merge_parts[(num_programs, -(-most_rows // rows_at_once))](
            out,
            *scratch,
            plan.units,
            plan.programs,
            out if sinks is None else sinks,
            max_units=plan.max_units,
            num_programs=num_programs,
            out_stride=out.stride(0),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=layer.value_width,
            ROWS=rows_at_once,
            AT_ONCE=min(16, 64 // rows_at_once),
            num_warps=4,
            **common,
        )

    def _plan(
        self,
        layer: _Layer,
        tiles: Tiles,
        group: int,
        rows: _Rows,
        num_programs: int,
        num_slots: int,
    ) -> _Plan:
        """Returns the division of this step's work, which layers of one kind share."""
        key = layer.kv_heads, layer.window, layer.chunk, tiles, group, rows
        if key in self._plans:
            return self._plans[key]
        metadata = self._metadata
        assert metadata is not None
        tile_tokens = tiles.rows // group
        max_units = rows.decodes
        if rows.chunks:  # in a graph it is not known how many of the tokens are decodes
            max_units += metadata.num_tokens // tile_tokens + rows.chunks
        sizes = UNIT_FIELDS * (max_units + 1), PROGRAM_FIELDS * (num_programs + 1)
        units, programs = (
            torch.empty(size, dtype=torch.int32, device=metadata.seq_lens.device) for size in sizes
        )
        plan = _Plan(units, programs, max_units)
        plan_attention[(1,)](
            plan.units,
            plan.programs,
            metadata.cu_q[rows.first :],
            metadata.seq_lens[rows.first :],
            num_decodes=rows.decodes,
            num_chunks=rows.chunks,
            max_units=max_units,
            num_programs=num_programs,
            num_slots=num_slots,
            window=layer.window or 0,
            chunk=layer.chunk or 0,
            KV_HEADS=layer.kv_heads,
            TILE_TOKENS=tile_tokens,
            STEP=self._step_keys(tiles),
            HAS_WINDOW=layer.window is not None,
            HAS_CHUNK=layer.chunk is not None,
            KEEPS_STEPS=self._is_invariant,
            BLOCK=_PLANNED_AT_ONCE,
            num_warps=8,
        )
        self._plans[key] = plan
        return plan

    def _step_keys(self, tiles: Tiles) -> int:
        return _INVARIANT_KEYS if self._is_invariant else tiles.keys

    def _scratch_of(
        self, shape: tuple[int, int, int], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns where parts are kept until they are merged: sums, best scores and totals.

        They stay: CUDA graphs have their addresses.
        """
        if shape not in self._scratch:
            sums = torch.empty(shape, dtype=torch.float32, device=device)
            best, total = torch.empty((2, *shape[:2]), dtype=torch.float32, device=device)
            self._scratch[shape] = sums, best, total
        return self._scratch[shape]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sequences of a step: from the `first` on some decodes, then some chunks."""

    first: int
    decodes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """What `plan_attention` writes."""

    units: Tensor  # [UNIT_FIELDS * (max_units + 1)] int32
    programs: Tensor  # [PROGRAM_FIELDS * (programs + 1)] int32
    max_units: int


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's part of the pool, and what the kernels get for it at every step."""

    keys: Tensor
    values: Tensor
    kv_heads: int
    key_width: int  # of a tile
    value_width: int
    window: int | None
    chunk: int | None
    kv_group: int
    arguments: dict[str, Any]  # of the kernel, by name

    @property
    def has_reach(self) -> bool:
        return self.window is not None or self.chunk is not None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, scores: LayerScores, kv_group: int) -> _Layer:
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
        return cls(
            keys,
            values,
            keys.shape[2],
            key_width,
            value_width,
            reach.window,
            reach.chunk,
            kv_group,
            arguments,
        )


def decode_tiles(group: int, width: int, dtype: torch.dtype, *, is_narrow: bool = False) -> Tiles:
    """Returns the tiles of the kernel for single queries of `group` heads, `width` wide.

    `is_narrow`: with half of the keys.
    """
    rows = max(_MIN_ROWS, triton.next_power_of_2(group))
    is_wide = width * dtype.itemsize > 256
    keys = (32 if is_wide else 64) // (2 if is_narrow else 1)
    if dtype.itemsize == 4:  # the matrix units have no float32: products are in registers
        return Tiles(rows, max(_MIN_ROWS, keys // 2), 4, 3)
    return Tiles(rows, keys, 2 if rows == _MIN_ROWS else 4, 3)


def chunk_tiles(group: int, width: int, dtype: torch.dtype, *, is_narrow: bool = False) -> Tiles:
    """Returns the tiles of the kernel for chunks of prompts, as `decode_tiles` does."""
    is_wide = width * dtype.itemsize > 256
    rows = max(64 if is_wide else 128, triton.next_power_of_2(group))
    keys = (32 if is_wide else 64) // (2 if is_narrow else 1)
    if dtype.itemsize == 4:
        rows = max(32, triton.next_power_of_2(group))
        keys = max(_MIN_ROWS, keys // 2)
    return Tiles(rows, keys, 8, 2)


def invariant_tiles(group: int, width: int, dtype: torch.dtype) -> Tiles:
    """Returns the tiles of one kernel for all queries, as `decode_tiles` does."""
    rows = max(64, triton.next_power_of_2(group))
    is_wide = width * dtype.itemsize > 256
    return Tiles(rows, 32 if is_wide else 64, 8, 1 if is_wide else 2)


def _width(dim: int) -> int:
    """Returns the columns of a tile for heads of `dim`: what `tl.dot` takes."""
    return max(_MIN_ROWS, int(triton.next_power_of_2(dim)))


def _lacks_wgmma(device: torch.device) -> bool:
    """Returns whether operands of `tl.dot` are in registers, of which FP8 needs twice as many: as
    it is and widened."""
    # 9 is Hopper, 10 the data centre's Blackwell; the others, of 12, have none.
    return _capability(device) not in (0, 9, 10)


def _capability(device: torch.device) -> int:
    """Returns the major number of a CUDA device's compute capability, 0 for another device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # in the interpreter
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count

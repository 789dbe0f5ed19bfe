"""Reference attention: blocks gathered, then torch's scaled dot product attention.

Runs wherever torch runs, for every dtype, head size and block size; the other backends are measured
against it. Decodes are batched by similar length, prefill chunks run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.model.attention.scores import attend
from worker.model.base import FP8, AttentionMetadata, LayerScores, Reach
from worker.model.device import to_device
from worker.model.kv_cache import KVCachePool
from worker.model.layers.fp8 import saturated

# A decode group gathers at most this many places, and none of its sequences is shorter than this
# part of the longest: bounds of the gathered copy's size and of its padding.
_MAX_GATHERED_PLACES = 1 << 16
_MIN_FILL = 0.5


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: Tensor | None  # [n] batch rows; None: the first n in order
    num_rows: int
    blocks: Tensor  # [n, num_blocks] from the first that a query reaches
    is_padding: Tensor  # [n, places] True past a sequence's end
    is_attended: Tensor  # [n, places]
    shortest: int  # no place before this one is padding


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: int
    end: int
    blocks: Tensor | None  # [num_blocks] from the first that a query reaches; None: nothing cached
    context_len: int  # places of these blocks up to the last query's
    mask: Tensor | None  # [queries, context] True where attended; None: plainly causal


@dataclass(frozen=True, slots=True)
class _Plan:
    decodes: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class SdpaAttention:
    """An AttentionBackend over `pool`, whose layers may differ; of another dtype than the queries
    only where it is in FP8."""

    def __init__(self, pool: KVCachePool, layers: Sequence[LayerScores] | None = None) -> None:
        """Without `layers` every one is LayerScores()."""
        self._pool = pool
        self._layers = (LayerScores(),) * len(pool.keys) if layers is None else tuple(layers)
        self._slot_blocks = torch.empty(0)  # [G, T], as the next
        self._slot_offsets = torch.empty(0)
        self._metadata: AttentionMetadata | None = None
        # What `store` got: prompts that begin in this step are not gathered from their blocks.
        self._stored: tuple[Tensor, Tensor] | None = None
        self._plans: dict[tuple[Reach, int], _Plan] = {}  # by the KV group, too

    def prepare(self, metadata: AttentionMetadata) -> None:
        size = self._pool.block_size
        slots = metadata.slots.long()
        self._slot_blocks = torch.div(slots, size, rounding_mode="floor")
        self._slot_offsets = slots % size
        self._metadata = metadata
        self._plans = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._pool.storage.dtype is FP8:
            k, v = saturated(k), saturated(v)
        group = self._pool.groups.of_layers[layer]
        places = self._slot_blocks[group], self._slot_offsets[group]
        self._pool.keys[layer][places] = k
        self._pool.values[layer][places] = v
        self._stored = (k, v)

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        """Attends as AttentionBackend defines. `sinks` [heads]: scores of a key without a value."""
        assert self._stored is not None, "attend comes after store"
        (k, v), self._stored = self._stored, None
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        scores = self._layers[layer]
        kind = scores.reach, self._pool.groups.of_layers[layer]
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plans[kind] = self._plan(*kind)
        if sinks is not None:
            sinks = sinks.view(keys.shape[2], -1)
        for group in plan.decodes:
            _attend_decodes(group, q, keys, values, out, scores, sinks)
        for chunk in plan.chunks:
            _attend_chunk(chunk, q, k, v, keys, values, out, scores, sinks)

    def _plan(self, reach: Reach, kv_group: int) -> _Plan:
        metadata = self._metadata
        assert metadata is not None, "attend comes after prepare"
        chunks, start = [], metadata.num_decodes
        for row in range(metadata.num_decodes, len(metadata.query_lens)):
            end = start + metadata.query_lens[row]
            chunks.append(self._chunk(metadata, row, start, end, reach, kv_group))
            start = end
        return _Plan(tuple(self._group_decodes(metadata, reach, kv_group)), tuple(chunks))

    def _group_decodes(
        self, metadata: AttentionMetadata, reach: Reach, kv_group: int
    ) -> list[_DecodeGroup]:
        """Returns the decodes in groups; each gathers blocks from its own first one on."""
        size, device = self._pool.block_size, metadata.slots.device
        ends = metadata.context_lens[: metadata.num_decodes]
        reached = [reach.first(end - 1) for end in ends]
        first_blocks = [first // size for first in reached]
        lens = tuple(end - first * size for end, first in zip(ends, first_blocks, strict=True))
        groups = []
        for rows in group_by_length(lens, size):
            num_blocks = -(-max(lens[row] for row in rows) // size)
            index = None
            if rows != list(range(len(rows))):
                index = to_device(np.array(rows, dtype=np.int64), device)
            table, seq_lens = metadata.block_tables[kv_group], metadata.seq_lens
            table = table[: len(rows)] if index is None else table.index_select(0, index)
            seq_lens = seq_lens[: len(rows)] if index is None else seq_lens.index_select(0, index)
            places = torch.arange(num_blocks * size, device=device, dtype=torch.int32)[None, :]
            if any(reached[row] for row in rows):
                numbers = np.array([[first_blocks[row], reached[row]] for row in rows])
                firsts, attended_from = to_device(numbers, device).chunk(2, dim=1)
                places = places + firsts * size
                columns = torch.arange(num_blocks, device=device)[None, :] + firsts
                table = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
                is_padding = places >= seq_lens[:, None]
                is_attended = ~is_padding & (places >= attended_from)
            else:
                is_padding = places >= seq_lens[:, None]
                is_attended = ~is_padding
            blocks, shortest = table[:, :num_blocks].long(), min(lens[row] for row in rows)
            groups.append(_DecodeGroup(index, len(rows), blocks, is_padding, is_attended, shortest))
        return groups

    def _chunk(
        self,
        metadata: AttentionMetadata,
        row: int,
        start: int,
        end: int,
        reach: Reach,
        kv_group: int,
    ) -> _Chunk:
        size, context_len = self._pool.block_size, metadata.context_lens[row]
        first_query = context_len - (end - start)
        if not first_query and not reach.first(context_len - 1):
            return _Chunk(start, end, None, context_len, None)
        first_block = reach.first(first_query) // size
        places = torch.arange(first_block * size, context_len, device=metadata.slots.device)
        mask = reach.mask(places[first_query - first_block * size :, None], places[None, :])
        blocks = None
        if first_query:
            table = metadata.block_tables[kv_group, row]
            blocks = table[first_block : -(-context_len // size)].long()
        return _Chunk(start, end, blocks, context_len - first_block * size, mask)


def group_by_length(lens: tuple[int, ...], block_size: int) -> list[list[int]]:
    """Returns rows in groups of similar length; a batch that fits in one group keeps its order."""
    order = sorted(range(len(lens)), key=lambda row: -lens[row])
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        places = -(-longest // block_size) * block_size
        full = groups and (len(groups[-1]) + 1) * places > _MAX_GATHERED_PLACES
        if not groups or full or lens[row] < _MIN_FILL * longest:
            groups.append([])
            longest = lens[row]
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _attend_decodes(
    group: _DecodeGroup,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scores: LayerScores,
    sinks: Tensor | None,
) -> None:
    """Computes the decodes of a group: reads q [T, heads, key_dim], writes their rows of `out`.

    `keys` and `values` are [blocks, block_size, kv_heads, ...], `sinks` [kv_heads, group]. The
    query heads of one key head become rows of one matrix: no key is read twice.
    """
    kv_heads = keys.shape[2]
    rows = slice(0, group.num_rows) if group.rows is None else group.rows
    queries = q[rows].reshape(group.num_rows, kv_heads, -1, keys.shape[3])
    # Zeros for the places past the end: a NaN that another sequence left there would survive
    # a mask, because 0 * NaN is NaN.
    padding = group.is_padding[:, group.shortest :, None, None]
    gathered_k = keys[group.blocks].flatten(1, 2).to(q.dtype)
    gathered_v = values[group.blocks].flatten(1, 2).to(q.dtype)
    gathered_k[:, group.shortest :].masked_fill_(padding, 0)
    gathered_v[:, group.shortest :].masked_fill_(padding, 0)
    attended = attend(
        queries,
        gathered_k.transpose(1, 2),
        gathered_v.transpose(1, 2),
        scores,
        mask=group.is_attended[:, None, None, :],
        sinks=None if sinks is None else sinks[None, :, :, None],
    )
    out[rows] = attended.reshape(group.num_rows, -1, values.shape[3])


def _attend_chunk(
    chunk: _Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scores: LayerScores,
    sinks: Tensor | None,
) -> None:
    """Computes one chunk of a prompt: reads q, k, v [T, heads, ...], writes its rows of `out`.

    `keys` and `values` are [blocks, block_size, kv_heads, ...], `sinks` [kv_heads, group]. The
    groups of query heads become the batch, over one copy of the keys.
    """
    kv_heads = keys.shape[2]
    tokens = slice(chunk.start, chunk.end)
    queries = q[tokens].reshape(chunk.end - chunk.start, kv_heads, -1, keys.shape[3])
    queries = queries.permute(2, 1, 0, 3)
    if chunk.blocks is None:
        context_k, context_v = k[tokens], v[tokens]
    else:
        context_k = keys[chunk.blocks].flatten(0, 1)[: chunk.context_len]
        context_v = values[chunk.blocks].flatten(0, 1)[: chunk.context_len]
    groups = queries.shape[0]
    context_k, context_v = context_k.to(q.dtype), context_v.to(q.dtype)
    attended = attend(
        queries,
        context_k.transpose(0, 1).expand(groups, -1, -1, -1),
        context_v.transpose(0, 1).expand(groups, -1, -1, -1),
        scores,
        mask=chunk.mask,
        sinks=None if sinks is None else sinks.t()[:, :, None, None],
    )
    out[tokens] = attended.permute(2, 1, 0, 3).flatten(1, 2)

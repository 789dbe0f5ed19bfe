"""StepBuffers: the inputs and outputs of captured steps, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.base import AttentionMetadata
from worker.model.cuda.kernels.fill_step import fill_step

_COLUMNS_A_PROGRAM = 128


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """What a graph computes, padding included: `decodes` sequences of one token each, then
    `chunks`; `tokens` of both."""

    tokens: int
    decodes: int
    chunks: int = 0

    @property
    def sequences(self) -> int:
        return self.decodes + self.chunks


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """A step's tensors; a graph's are the first of each, in all groups. All but `hidden` are
    int32."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [G, T] of G KV groups; -1: padding
    seq_lens: Tensor  # [S]; 0: padding
    tables: Tensor  # [G, S, max_blocks]; columns past a sequence's end hold anything
    cu_q: Tensor  # [S + 1]; of padded decodes anything
    hidden: Tensor  # [T, hidden], the result

    @classmethod
    def zeros(
        cls,
        num_tokens: int,
        num_seqs: int,
        max_blocks: int,
        num_kv_groups: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StepBuffers:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            token_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            slots=zeros(num_kv_groups, num_tokens).fill_(-1),
            seq_lens=zeros(num_seqs),
            tables=zeros(num_kv_groups, num_seqs, max_blocks),
            cu_q=zeros(num_seqs + 1),
            hidden=torch.zeros((num_tokens, hidden_size), dtype=dtype, device=device),
        )

    def fill(
        self, shape: GraphShape, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Copies a step that `shape` has room for; the rest of `shape` becomes padding."""
        tables = metadata.block_tables
        num_groups, _, width = tables.shape
        num_programs = max(shape.tokens, shape.sequences + 1)
        fill_step[(num_programs, -(-width // _COLUMNS_A_PROGRAM), num_groups)](
            self.token_ids,
            self.positions,
            self.slots,
            self.seq_lens,
            self.tables,
            self.cu_q,
            token_ids,
            positions,
            metadata.slots,
            metadata.seq_lens,
            tables,
            metadata.cu_q,
            num_tokens=metadata.num_tokens,
            num_decodes=metadata.num_decodes,
            num_seqs=len(metadata.query_lens),
            width=width,
            to_stride=self.tables.stride(1),
            from_stride=tables.stride(1),
            to_group_stride=self.tables.stride(0),
            from_group_stride=tables.stride(0),
            to_slots_stride=self.slots.stride(0),
            from_slots_stride=metadata.slots.stride(0),
            padded_tokens=shape.tokens,
            padded_decodes=shape.decodes,
            padded_seqs=shape.sequences,
            COLUMNS=_COLUMNS_A_PROGRAM,
            num_warps=1,
        )

    def metadata(self, shape: GraphShape) -> AttentionMetadata:
        """Returns a step of that shape over these buffers.

        Chunks may begin at any token: which ones are decodes is only known at a replay.
        """
        query_lens = (1,) * shape.decodes + (0,) * shape.chunks
        return AttentionMetadata(
            cu_q=self.cu_q[: shape.sequences + 1],
            seq_lens=self.seq_lens[: shape.sequences],
            block_tables=self.tables[:, : shape.sequences],
            slots=self.slots[:, : shape.tokens],
            num_decodes=shape.decodes,
            max_query_len=1 if not shape.chunks else shape.tokens,
            num_tokens=shape.tokens,
            query_lens=query_lens,
            context_lens=query_lens,
        )

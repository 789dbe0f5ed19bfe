"""fill_step: copies a step's tensors to where its CUDA graph reads them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "token_ids",
        "positions",
        "slots",
        "seq_lens",
        "table",
        "cu_q",
        "num_tokens",
        "num_decodes",
        "num_seqs",
        "width",
        "from_stride",
        "to_group_stride",
        "from_group_stride",
        "to_slots_stride",
        "from_slots_stride",
        "padded_tokens",
        "padded_decodes",
        "padded_seqs",
    ]
)
def fill_step(
    to_token_ids,
    to_positions,
    to_slots,
    to_seq_lens,
    to_table,
    to_cu_q,
    token_ids,  # [num_tokens], like the next one
    positions,
    slots,  # [groups, num_tokens]
    seq_lens,  # [num_seqs]; decodes come first
    table,  # [groups, num_seqs, width]
    cu_q,  # [num_seqs + 1]
    num_tokens,
    num_decodes,
    num_seqs,
    width,
    to_stride,
    from_stride,
    to_group_stride,
    from_group_stride,
    to_slots_stride,
    from_slots_stride,
    padded_tokens,
    padded_decodes,
    padded_seqs,
    COLUMNS: tl.constexpr,
):
    """Copies a step into the buffers of a graph, and makes padding of what it does not fill.

    Tokens keep their places, and so do decodes; chunks go after the padded decodes.
    Grid: (the larger of padded tokens and padded sequences + 1, pieces of a table's row, groups).
    """
    row, piece, group = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_decode = row < padded_decodes
    source = tl.where(is_decode, row, num_decodes + row - padded_decodes)
    is_real = tl.where(is_decode, row < num_decodes, source < num_seqs) & (row < padded_seqs)
    if piece == 0:
        is_token = row < num_tokens
        is_padded = row < padded_tokens
        token_id = tl.load(token_ids + row, mask=is_token, other=0)
        tl.store(to_token_ids + row, token_id, mask=is_padded)
        position = tl.load(positions + row, mask=is_token, other=0)
        tl.store(to_positions + row, position, mask=is_padded)
        slot = tl.load(slots + group * from_slots_stride + row, mask=is_token, other=-1)
        tl.store(to_slots + group * to_slots_stride + row, slot, mask=is_padded)
        length = tl.load(seq_lens + source, mask=is_real, other=0)
        tl.store(to_seq_lens + row, length, mask=row < padded_seqs)
        begin = tl.load(cu_q + source, mask=is_real, other=0)
        begin = tl.where(is_real, begin, num_tokens)  # chunks that are padding have no query
        tl.store(to_cu_q + row, begin, mask=row <= padded_seqs)
    columns = piece * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < width) & is_real
    table += group * from_group_stride + source.to(tl.int64) * from_stride
    blocks = tl.load(table + columns, mask=inside, other=0)
    to_table += group * to_group_stride + row.to(tl.int64) * to_stride
    tl.store(to_table + columns, blocks, mask=inside)

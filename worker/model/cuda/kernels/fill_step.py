"""What begins the replay of a step: its tensors go where the graph reads them."""

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
        "num_rows",
        "width",
        "from_stride",
    ]
)
def fill_step(
    to_token_ids,
    to_positions,
    to_slots,
    to_seq_lens,
    to_table,
    token_ids,
    positions,
    slots,
    seq_lens,
    table,
    num_rows,
    width,
    to_stride,
    from_stride,
    COLUMNS: tl.constexpr,
):
    """Copies a step into the buffers of a graph. Grid: (padded rows, pieces of a table's row)."""
    row, piece = tl.program_id(0), tl.program_id(1)
    is_real = row < num_rows
    if piece == 0:
        tl.store(to_token_ids + row, tl.load(token_ids + row, mask=is_real, other=0))
        tl.store(to_positions + row, tl.load(positions + row, mask=is_real, other=0))
        tl.store(to_slots + row, tl.load(slots + row, mask=is_real, other=-1))
        tl.store(to_seq_lens + row, tl.load(seq_lens + row, mask=is_real, other=0))
    columns = piece * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < width) & is_real
    blocks = tl.load(table + row * from_stride + columns, mask=inside, other=0)
    tl.store(to_table + row * to_stride + columns, blocks, mask=inside)

"""logits_scan: one pass over the logits, which edits them, draws from each block and measures it.

Each program has one block of one row. What the blocks found is put together by `sample_finalize`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.gumbel import gumbel, row_key

# What a row wants, in bits.
DRAWN = tl.constexpr(1)
FILTERED = tl.constexpr(2)
STRUCTURED = tl.constexpr(4)

# Columns of a row's int64 numbers, as long as the batch stays the same.
SEED_KEY = tl.constexpr(0)
FLAGS = tl.constexpr(1)
TOP_K = tl.constexpr(2)
EDITED_PLACE = tl.constexpr(3)  # in `edited`; -1: the row is not written there
NUM_INTS = tl.constexpr(4)
# Columns of a row's int64 numbers of one step.
POSITION = tl.constexpr(0)
SLOT = tl.constexpr(1)  # in the counts of penalties; -1: none
MASK = tl.constexpr(2)  # in the grammars' masks; -1: none
HOLDS_BACK = tl.constexpr(3)  # 1: stop tokens are suppressed
NUM_STEP_INTS = tl.constexpr(4)
# Columns of a row's float32 numbers, as long as the batch stays the same.
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
REACH = tl.constexpr(2)  # -log(min_p): how far below the best, over temperature, a token may be
REPETITION = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
NUM_FLOATS = tl.constexpr(6)
# The results of a block: columns of float32.
RAW_BEST = tl.constexpr(0)  # NaN where one is in the block
BEST = tl.constexpr(1)  # of the edited logits
MASS = tl.constexpr(2)  # of a filtered row: sum of exp((logit - best) / temperature)
WINNER = tl.constexpr(3)  # of another: the logit that won
NUM_FOUND = tl.constexpr(4)


@triton.jit(do_not_specialize=["num_edits", "num_words", "num_blocks", "num_groups"])
def logits_scan(
    logits,  # [rows, vocab] float32, bfloat16 or float16
    row_stride,
    ints,  # [rows, NUM_INTS]
    step_ints,  # [rows, NUM_STEP_INTS]
    floats,  # [rows, NUM_FLOATS]
    edit_starts,  # [rows * blocks + 1] int32: where a block's edits begin in the next two
    edit_tokens,  # [edits] int32; ~token where a stop token is suppressed
    edit_values,  # [edits] float32
    num_edits,
    output_counts,  # [slots, vocab] int32
    in_prompt,  # [slots, vocab] bool
    masks,  # [masks, words] int32
    num_words,
    edited,  # [places, vocab] float32
    group_best,  # [rows, groups] float32
    found,  # [rows, NUM_FOUND, blocks] float32
    winners,  # [rows, blocks] int32
    vocab,
    num_blocks,
    num_groups,
    HAS_EDITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    ints += row * NUM_INTS
    step_ints += row * NUM_STEP_INTS
    floats += row * NUM_FLOATS
    found += row * NUM_FOUND * num_blocks + block
    flags = tl.load(ints + FLAGS)
    position = tl.load(step_ints + POSITION)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = tl.load(logits + row * row_stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    raw_best = tl.max(x, axis=0)
    has_nan = tl.max((x != x).to(tl.int32), axis=0)
    tl.store(found + RAW_BEST * num_blocks, tl.where(has_nan > 0, float("nan"), raw_best))

    if HAS_EDITS:
        begin = block * 0
        end = begin
        if num_edits > 0:
            begin = tl.load(edit_starts + row * num_blocks + block)
            end = tl.load(edit_starts + row * num_blocks + block + 1)
        holds_back = tl.load(step_ints + HOLDS_BACK) != 0
        for i in range(begin, end):
            token = tl.load(edit_tokens + i)
            value = tl.load(edit_values + i)
            x = tl.where(ids == token, x + value, x)
            x = tl.where((ids == ~token) & holds_back, -float("inf"), x)
        slot = tl.load(step_ints + SLOT)
        if slot >= 0:
            counts = tl.load(output_counts + slot * vocab + ids, mask=inside, other=0)
            prompt = tl.load(in_prompt + slot * vocab + ids, mask=inside, other=0)
            repetition = tl.load(floats + REPETITION)
            repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = tl.where((counts > 0) | (prompt != 0), repeated, x)
            x -= tl.load(floats + FREQUENCY) * counts.to(tl.float32)
            x -= tl.load(floats + PRESENCE) * (counts > 0).to(tl.float32)
        mask = tl.load(step_ints + MASK)
        if mask >= 0:
            word = tl.load(masks + mask * num_words + ids // 32, mask=inside, other=0)
            x = tl.where(((word >> (ids % 32)) & 1) != 0, x, -float("inf"))
        x = tl.where(inside, x, -float("inf"))
        place = tl.load(ints + EDITED_PLACE)
        if place >= 0:
            tl.store(edited + place * vocab + ids, x, mask=inside)

    best = tl.max(x, axis=0)
    tl.store(found + BEST * num_blocks, best)
    temperature = tl.load(floats + TEMPERATURE)
    if (flags & FILTERED) != 0:
        scores = tl.where(x > -float("inf"), tl.div_rn(x - best, temperature), -float("inf"))
        tl.store(found + MASS * num_blocks, tl.sum(tl.exp(scores), axis=0))
        groups = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        of_group = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
        tl.store(group_best + row * num_groups + groups, of_group, mask=groups < num_groups)
    else:
        values = x
        if (flags & DRAWN) != 0:
            noise = gumbel(row_key(tl.load(ints + SEED_KEY), position), ids)
            scores = tl.div_rn(x - best, temperature) + noise
            values = tl.where(x > -float("inf"), scores, -float("inf"))
        values = tl.where(values == values, values, -float("inf"))
        _, winner = tl.max(values, axis=0, return_indices=True)
        won = tl.max(tl.where(ids == block * BLOCK + winner, x, -float("inf")), axis=0)
        tl.store(found + WINNER * num_blocks, won)
        tl.store(winners + row * num_blocks + block, tl.minimum(block * BLOCK + winner, vocab - 1))

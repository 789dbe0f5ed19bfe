"""plan_attention: divides one step's attention among programs, on the device.

A unit is a tile of queries of one sequence: one query of a decode, or some neighbouring ones of a
chunk. Its keys are cut into steps of a fixed number of keys. The steps of all units, once for each
key head, are one line of work, of which every program gets an equal piece: a long sequence is
computed by many programs, and many short ones by one.

The line is cut at the end of a unit where one is near. A unit that is cut leaves a part of its
result with each of its programs, in slots, which `merge_parts` merges in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Rows of `units`: [UNIT_FIELDS, max_units + 1], in the order of the line.
UNIT_ROW = tl.constexpr(0)  # sequence
UNIT_TOKEN = tl.constexpr(1)  # the first of its queries, among the step's tokens
UNIT_TOKENS = tl.constexpr(2)  # its queries
UNIT_POSITION = tl.constexpr(3)  # of the first of them in the sequence
UNIT_BEGIN = tl.constexpr(4)  # its first step, counted from the sequence's first key
UNIT_START = tl.constexpr(5)  # steps of the units before it; one more at the end: of all of them
UNIT_FIELDS = 6

# Rows of `programs`: [PROGRAM_FIELDS, num_programs + 1].
BOUND = tl.constexpr(0)  # where its piece of the line begins
BOUND_UNIT = tl.constexpr(1)  # the unit there
OWNER = tl.constexpr(2)  # the program in whose piece that unit begins
PARTS = tl.constexpr(3)  # slots of the unit that begins in its piece and is cut at its end, or 0
FIRST_SLOT = tl.constexpr(4)  # of that unit
PROGRAM_FIELDS = 5


@triton.jit(
    do_not_specialize=[
        "units",
        "programs",
        "cu_q",
        "seq_lens",
        "num_decodes",
        "num_chunks",
        "max_units",
        "num_programs",
        "num_slots",
        "window",
        "chunk",
    ]
)
def plan_attention(
    units,
    programs,
    cu_q,  # [num_decodes + num_chunks + 1]; those of decodes are not read
    seq_lens,  # [num_decodes + num_chunks]; 0: padding
    num_decodes,
    num_chunks,
    max_units,
    num_programs,
    num_slots,
    window,
    chunk,
    KV_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    STEP: tl.constexpr,  # keys
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    KEEPS_STEPS: tl.constexpr,  # each step has a slot, not all of a program's together
    BLOCK: tl.constexpr,
):
    """Fills `units` and `programs`. Grid: (1,).

    Chunks have (queries so far) // TILE_TOKENS + (chunks before) as the number of their first tile,
    so that a tile's chunk can be searched for; numbers without a tile are left out.
    """
    width = max_units + 1
    base = tl.load(cu_q + num_decodes, mask=num_chunks > 0, other=0)
    num_units = 0
    total = 0
    for begin in range(0, max_units, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        is_decode = number < num_decodes
        tile = number - num_decodes
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + num_chunks
        span = num_chunks
        while span > 0:  # the last chunk whose first tile is not after this one
            middle = (low + high) // 2
            is_open = (low < high) & (tile >= 0)
            first = tl.load(cu_q + num_decodes + middle, mask=is_open, other=0)
            is_before = (first - base) // TILE_TOKENS + middle <= tile
            low = tl.where(is_open & is_before, middle + 1, low)
            high = tl.where(is_open & (is_before == 0), middle, high)
            span = span // 2
        of_chunk = tl.maximum(low - 1, 0)
        is_tile = (tile >= 0) & (number < max_units)
        first = tl.load(cu_q + num_decodes + of_chunk, mask=is_tile, other=0)
        last = tl.load(cu_q + num_decodes + of_chunk + 1, mask=is_tile, other=0)
        row = tl.where(is_decode, number, num_decodes + of_chunk)
        token = tl.where(is_decode, number, first)
        queries = tl.where(is_decode, 1, last - first)
        skipped = (tile - ((first - base) // TILE_TOKENS + of_chunk)) * TILE_TOKENS
        skipped = tl.where(is_decode, 0, skipped)
        is_unit = (number < max_units) & (skipped < queries) & (is_decode | is_tile)
        length = tl.load(seq_lens + row, mask=is_unit, other=0)
        # The token of a padded decode may be a chunk's, which another program writes.
        is_unit = is_unit & ((length > 0) | (num_chunks == 0))
        tokens = tl.minimum(queries - skipped, TILE_TOKENS)
        position = length - queries + skipped
        reached = tl.zeros([BLOCK], tl.int32)
        if HAS_WINDOW:
            reached = tl.maximum(reached, position - window + 1)
        if HAS_CHUNK:
            reached = tl.maximum(reached, tl.maximum(position, 0) // chunk * chunk)
        begin_step = reached // STEP
        # Padding has a step without a key: its output becomes 0.
        steps = tl.maximum((position + tokens + STEP - 1) // STEP - begin_step, 1)
        steps = tl.where(is_unit, steps, 0)
        ones = is_unit.to(tl.int32)
        at = units + num_units + tl.cumsum(ones, 0) - 1
        tl.store(at + UNIT_ROW * width, row, mask=is_unit)
        tl.store(at + UNIT_TOKEN * width, token + skipped, mask=is_unit)
        tl.store(at + UNIT_TOKENS * width, tokens, mask=is_unit)
        tl.store(at + UNIT_POSITION * width, position, mask=is_unit)
        tl.store(at + UNIT_BEGIN * width, begin_step, mask=is_unit)
        tl.store(at + UNIT_START * width, total + tl.cumsum(steps, 0) - steps, mask=is_unit)
        num_units += tl.sum(ones, 0)
        total += tl.sum(steps, 0)
    starts = units + UNIT_START * width
    tl.store(starts + num_units, total)
    tl.debug_barrier()  # what one thread wrote is read by others

    work = total * KV_HEADS
    share = tl.maximum((work + num_programs - 1) // num_programs, 1)
    near = share // 32  # so that no program has more than 1.07 shares
    stride = num_programs + 1
    for begin in range(0, stride, BLOCK):
        program = begin + tl.arange(0, BLOCK)
        is_bound = program < stride
        bound = tl.minimum(tl.where(is_bound, program, 0) * share, work)
        before = bound // tl.maximum(total, 1) * total  # the heads before
        bound -= before
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + num_units
        span = num_units
        while span > 0:  # the last unit that does not start after the bound
            middle = (low + high) // 2
            is_open = (low < high) & is_bound
            is_before = tl.load(starts + middle, mask=is_open, other=0) <= bound
            low = tl.where(is_open & is_before, middle + 1, low)
            high = tl.where(is_open & (is_before == 0), middle, high)
            span = span // 2
        unit = tl.maximum(low - 1, 0)
        start = tl.load(starts + unit, mask=is_bound & (num_units > 0), other=0)
        stop = tl.load(starts + unit + 1, mask=is_bound & (num_units > 0), other=0)
        is_near_start = (bound - start <= near) & (bound - start <= stop - bound)
        is_near_stop = (stop - bound <= near) & (is_near_start == 0)
        bound = tl.where(is_near_start, start, tl.where(is_near_stop, stop, bound))
        unit = tl.where(is_near_stop, unit + 1, unit)
        unit = tl.where(unit == num_units, 0, unit)
        tl.store(programs + BOUND * stride + program, before + bound, mask=is_bound)
        tl.store(programs + BOUND_UNIT * stride + program, unit, mask=is_bound)
    tl.debug_barrier()

    used = 0
    for begin in range(0, num_programs, BLOCK):
        program = begin + tl.arange(0, BLOCK)
        inside = (program < num_programs) & (total > 0)
        bound = tl.load(programs + BOUND * stride + program, mask=inside, other=0)
        unit = tl.load(programs + BOUND_UNIT * stride + program, mask=inside, other=0)
        start = bound // tl.maximum(total, 1) * total
        start += tl.load(starts + unit, mask=inside, other=0)
        # Bounds are near multiples of the share: those beside one are looked at.
        owner = start // share
        here = tl.load(programs + BOUND * stride + owner, mask=inside, other=0)
        above = tl.load(
            programs + BOUND * stride + owner + 1,
            mask=inside & (owner < num_programs),
            other=2147483647,
        )
        owner = tl.where(here > start, owner - 1, tl.where(above <= start, owner + 1, owner))
        owner = tl.where(start < bound, owner, program)
        tl.store(programs + OWNER * stride + program, owner, mask=program < num_programs)
        # The unit at this program's end.
        after = tl.load(programs + BOUND * stride + program + 1, mask=inside, other=0)
        unit = tl.load(programs + BOUND_UNIT * stride + program + 1, mask=inside, other=0)
        start = after // tl.maximum(total, 1) * total
        stop = start + tl.load(starts + unit + 1, mask=inside, other=0)
        start += tl.load(starts + unit, mask=inside, other=0)
        is_cut = inside & (start < after) & (start >= bound)
        if KEEPS_STEPS:
            parts = stop - start
        else:
            last = (stop - 1) // share
            here = tl.load(programs + BOUND * stride + last, mask=is_cut, other=0)
            above = tl.load(programs + BOUND * stride + last + 1, mask=is_cut, other=0)
            last = tl.where(here >= stop, last - 1, tl.where(above < stop, last + 1, last))
            parts = last - program + 1
        parts = tl.where(is_cut, parts, 0)
        slot = used + tl.cumsum(parts, 0) - parts
        used += tl.sum(parts, 0)
        parts = tl.where(slot + parts <= num_slots, parts, 0)
        tl.store(programs + PARTS * stride + program, parts, mask=program < num_programs)
        tl.store(programs + FIRST_SLOT * stride + program, slot, mask=program < num_programs)
    if KEEPS_STEPS:
        # Units for which there is no slot are left whole, to the program where they begin.
        tl.debug_barrier()
        for begin in range(0, num_programs, BLOCK):
            program = begin + tl.arange(0, BLOCK)
            inside = (program < num_programs) & (total > 0)
            bound = tl.load(programs + BOUND * stride + program, mask=inside, other=0)
            unit = tl.load(programs + BOUND_UNIT * stride + program, mask=inside, other=0)
            owner = tl.load(programs + OWNER * stride + program, mask=inside, other=0)
            before = bound // tl.maximum(total, 1) * total
            start = before + tl.load(starts + unit, mask=inside, other=0)
            stop = before + tl.load(starts + unit + 1, mask=inside, other=0)
            parts = tl.load(programs + PARTS * stride + owner, mask=inside, other=0)
            is_left = inside & (start < bound) & (parts == 0)
            unit = tl.where(unit + 1 == num_units, 0, unit + 1)
            tl.store(programs + BOUND * stride + program, stop, mask=is_left)
            tl.store(programs + BOUND_UNIT * stride + program, unit, mask=is_left)

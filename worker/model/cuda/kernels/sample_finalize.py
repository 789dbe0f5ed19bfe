"""sample_finalize: samples one token for each row from what `logits_scan` found, with filters.

A filtered row is not sorted. `logits_scan` has noted the best logit of each group of neighbouring
tokens; only groups that can hold a kept token are read again. A token's key is its distance below
the row's best, over temperature, read as an integer: the smaller, the likelier. The last kept key
is found bit by bit, by counts (top-k) and by masses (top-p).
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.model.cuda.kernels.gumbel import gumbel, row_key
from worker.model.cuda.kernels.logits_scan import (
    BEST,
    DRAWN,
    EDITED_PLACE,
    FILTERED,
    FLAGS,
    MASS,
    NUM_FLOATS,
    NUM_FOUND,
    NUM_INTS,
    NUM_STEP_INTS,
    POSITION,
    RAW_BEST,
    REACH,
    SEED_KEY,
    STRUCTURED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WINNER,
)

_FINITE = tl.constexpr(0x7F7FFFFF)  # the largest key of a token that can be drawn
_BEYOND = tl.constexpr(0x7FFFFFFF)
_MANY = tl.constexpr(1 << 30)
_FAR = tl.constexpr(32.0)  # e**-32 of the likeliest: mostly nothing that stays is further away
# Sums of a block and of its parts differ by their order: so much more mass is looked for.
_MARGIN = tl.constexpr(1.00001)


@triton.jit
def _key(below, temperature):
    """Returns int32, from how far a logit is below the best. Zeros have signs, keys do not."""
    return tl.abs(tl.div_rn(below, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _distance(key):
    return key.to(tl.float32, bitcast=True)


@triton.jit
def _tile(
    source, edited, is_edited, hot, start, num_hot, best, temperature, vocab,
    TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns token ids, ascending, and keys of `TILE` of the hot groups, [TILE * GROUP] int32."""
    at = start + tl.arange(0, TILE)
    group = tl.load(hot + at, mask=at < num_hot, other=0)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (at < num_hot)[:, None] & (ids < vocab)
    raw = tl.load(source + ids, mask=inside & (is_edited == 0), other=-float("inf"))
    changed = tl.load(edited + ids, mask=inside & (is_edited != 0), other=-float("inf"))
    x = tl.where(is_edited != 0, changed, raw.to(tl.float32))
    keys = _key(best - x, temperature)
    keys = tl.where(inside, keys, _BEYOND)
    return tl.reshape(ids, (TILE * GROUP,)), tl.reshape(keys, (TILE * GROUP,))


@triton.jit
def _sums(
    pivot, source, edited, is_edited, hot, num_hot, best, temperature, vocab,
    TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns how many keys of the hot groups are below the pivot and, float64, their mass."""
    count = tl.zeros((TILE * GROUP,), tl.int32)
    mass = tl.zeros((TILE * GROUP,), tl.float32)
    for start in range(0, num_hot, TILE):
        _, keys = _tile(
            source, edited, is_edited, hot, start, num_hot, best, temperature, vocab, TILE, GROUP
        )
        is_below = keys < pivot
        count += is_below.to(tl.int32)
        mass += tl.where(is_below, tl.exp(-_distance(keys)), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def _between(
    low, high, few, source, edited, is_edited, hot, num_hot, best, temperature, vocab,
    TILE: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Returns the keys of the hot groups in [low, high), [FEW] int32, written to `few` first.

    More than FEW of them are of one key, and of no use.
    """
    num_found = low * 0
    for start in range(0, num_hot, TILE):
        _, keys = _tile(
            source, edited, is_edited, hot, start, num_hot, best, temperature, vocab, TILE, GROUP
        )
        is_in = ((keys >= low) & (keys < high)).to(tl.int32)
        place = num_found + tl.cumsum(is_in, axis=0) - 1
        tl.store(few + place, keys, mask=(is_in != 0) & (place < FEW))
        num_found += tl.sum(is_in, axis=0)
    tl.debug_barrier()  # what other threads wrote to `few` is read
    at = tl.arange(0, FEW)
    keys = tl.load(few + at, mask=at < num_found, other=_BEYOND)
    tl.debug_barrier()  # before it is written again
    return keys


@triton.jit
def _last_kept(
    last, top_k, top_p, mass, knows_mass, few,
    source, edited, is_edited, hot, num_hot, best, temperature, vocab,
    TILE: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Returns the last key that stays, and how many of the tokens that have it do.

    First it is top-k's, then top-p's. Tokens up to the key `last` are possible; their mass is
    float64, and of no use unless `knows_mass`.
    """
    num_level = vocab * 0 + _MANY
    for is_nucleus in range(2):
        is_wanted = tl.where(is_nucleus != 0, top_p < 1, knows_mass == 0)
        if is_wanted:
            max_count = tl.where(is_nucleus != 0, _MANY, top_k)
            max_mass = tl.where(is_nucleus != 0, top_p.to(tl.float64) * mass, float("inf"))
            # `low` will be the largest pivot with less than that below it: beyond all tokens, or a
            # key. If few candidates are left, they stay in registers.
            low = last * 0
            low_count = last * 0
            low_mass = mass * 0
            high = last + 2
            high_count = last * 0 + _MANY
            pivot = last + 1
            step = last * 0
            while (high - low > 1) & (high_count - low_count > FEW):
                count, below = _sums(
                    pivot, source, edited, is_edited, hot, num_hot, best, temperature, vocab,
                    TILE, GROUP,
                )  # fmt: skip
                is_low = (count < max_count) & (below < max_mass)
                low_count = tl.where(is_low, count, low_count)
                low_mass = tl.where(is_low, below, low_mass)
                high_count = tl.where(is_low, high_count, count)
                low = tl.where(is_low, pivot, low)
                high = tl.where(is_low, high, pivot)
                # Half the distance; half the bits where that comes to no end.
                half = (_distance(low) + tl.minimum(_distance(high), _FAR)) * 0.5
                pivot = tl.where(
                    step < 12, half.to(tl.int32, bitcast=True), low + (high - low) // 2
                )
                pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
                step += 1
            if high - low > 1:
                keys = _between(
                    low, high, few, source, edited, is_edited, hot, num_hot, best, temperature,
                    vocab, TILE, GROUP, FEW,
                )  # fmt: skip
                masses = tl.exp(-_distance(keys))
                base_count = low_count
                base_mass = low_mass
                while high - low > 1:
                    pivot = low + (high - low) // 2
                    is_below = keys < pivot
                    count = base_count + tl.sum(is_below.to(tl.int32), axis=0)
                    part = tl.where(is_below, masses, 0.0).to(tl.float64)
                    below = base_mass + tl.sum(part, axis=0)
                    is_low = (count < max_count) & (below < max_mass)
                    low_count = tl.where(is_low, count, low_count)
                    low_mass = tl.where(is_low, below, low_mass)
                    low = tl.where(is_low, pivot, low)
                    high = tl.where(is_low, high, pivot)
            each = tl.exp(-_distance(low)).to(tl.float64)
            share = tl.ceil((max_mass - low_mass) / each)
            share = tl.minimum(tl.maximum(share, 1.0), 1.0 * _MANY).to(tl.int32)
            level = tl.minimum(max_count - low_count, share)
            level = tl.where(low == last, tl.minimum(level, num_level), level)
            has_all = low > last
            num_level = tl.where(has_all, num_level, level)
            left = tl.where(has_all, 0.0, level.to(tl.float64) * each)
            mass = tl.where(is_nucleus != 0, mass, low_mass + left)
            last = tl.where(has_all, last, low)
    return last, num_level


@triton.jit
def _drawn(
    last, num_level, noise_key, source, edited, is_edited, hot, num_hot, best, temperature, vocab,
    TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns the token that wins of those before `last` and the first `num_level` that have it."""
    best_value = best * 0 - float("inf")
    token = num_hot * 0
    num_seen = num_hot * 0
    for start in range(0, num_hot, TILE):
        ids, keys = _tile(
            source, edited, is_edited, hot, start, num_hot, best, temperature, vocab, TILE, GROUP
        )
        is_level = (keys == last).to(tl.int32)
        rank = num_seen + tl.cumsum(is_level, axis=0)
        num_seen += tl.sum(is_level, axis=0)
        stays = (keys < last) | ((is_level != 0) & (rank <= num_level))
        values = tl.where(stays, gumbel(noise_key, ids) - _distance(keys), -float("inf"))
        value, place = tl.max(values, axis=0, return_indices=True)
        found = tl.sum(tl.where(tl.arange(0, TILE * GROUP) == place, ids, 0), axis=0)
        token = tl.where(value > best_value, found, token)
        best_value = tl.maximum(best_value, value)
    return token


@triton.jit
def _hot_groups(
    group_best, hot, num_groups, best, temperature, last, top_k, wanted, by_mass,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Writes which groups are to be read, ascending, to `hot`.

    Returns how many, and the key up to which tokens may stay: `last` or less.

    As many groups as top-k keeps tokens have a token each that is at least as likely as the worst
    of their best; likewise for the mass that is `wanted`. No group whose best is worse has one that
    stays.
    """
    groups = tl.arange(0, GROUPS)
    x = tl.load(group_best + groups, mask=groups < num_groups, other=-float("inf"))
    keys = _key(best - x, temperature)
    keys = tl.where(x > -float("inf"), keys, _BEYOND)
    mass = tl.exp(-_distance(keys))
    low = last * 0 - 1
    high = last
    # A key a little too large costs a few groups more: the last bits are not looked at.
    while high - low > (1 << 13):
        pivot = low + (high - low) // 2
        within = keys <= pivot
        count = tl.sum(within.to(tl.int32), axis=0)
        amount = tl.sum(tl.where(within, mass, 0.0), axis=0)
        is_enough = tl.where(by_mass, amount >= wanted, count >= top_k)
        high = tl.where(is_enough, pivot, high)
        low = tl.where(is_enough, low, pivot)
    is_hot = keys <= high
    place = tl.cumsum(is_hot.to(tl.int32), axis=0) - 1
    tl.store(hot + place, groups, mask=is_hot)
    return tl.sum(is_hot.to(tl.int32), axis=0), high


@triton.jit
def keep(
    top_k, top_p, reach, of_blocks, part, group_best, num_groups, hot, few,
    source, edited, is_edited, best, temperature, vocab,
    GROUPS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Returns the last key of a row that stays, how many of its tokens do, and of hot groups.

    `of_blocks` and `part` are the best logits and the masses of the row's blocks.
    """
    last = tl.minimum(reach.to(tl.int32, bitcast=True), _FINITE)
    factor = tl.exp(-tl.div_rn(best - of_blocks, temperature))
    mass = tl.sum(tl.where(part > 0, part * factor, 0.0).to(tl.float64), axis=0)
    has_all = (last == _FINITE) & (top_k >= vocab)
    by_mass = has_all & (top_p < 1)
    enough = tl.where(top_k < vocab, top_k, _MANY)
    wanted = (top_p.to(tl.float64) * mass * _MARGIN).to(tl.float32)
    num_hot, last = _hot_groups(
        group_best, hot, num_groups, best, temperature, last, enough, wanted, by_mass, GROUPS
    )
    tl.debug_barrier()  # what other threads wrote to `hot` is read
    last, num_level = _last_kept(
        last, top_k, top_p, mass, has_all.to(tl.int32), few,
        source, edited, is_edited, hot, num_hot, best, temperature, vocab, TILE, GROUP, FEW,
    )  # fmt: skip
    return last, num_level, num_hot


@triton.jit(do_not_specialize=["num_blocks", "num_groups"])
def sample_finalize(
    logits,  # as of `logits_scan`, like what else has its name
    row_stride,
    ints,
    step_ints,
    floats,
    edited,
    group_best,
    scratch,  # [rows, groups + FEW] int32
    found,
    winners,
    token_ids,  # [rows] int64, the result
    best_logits,  # [rows] float32, the result
    vocab,
    num_blocks,
    num_groups,
    HAS_FILTERS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ints += row * NUM_INTS
    floats += row * NUM_FLOATS
    found += row * NUM_FOUND * num_blocks
    flags = tl.load(ints + FLAGS)
    noise_key = row_key(
        tl.load(ints + SEED_KEY), tl.load(step_ints + row * NUM_STEP_INTS + POSITION)
    )
    temperature = tl.load(floats + TEMPERATURE)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    raw = tl.load(found + RAW_BEST * num_blocks + blocks, mask=inside, other=-float("inf"))
    has_nan = tl.max((raw != raw).to(tl.int32), axis=0)
    raw_best = tl.where(has_nan > 0, float("nan"), tl.max(raw, axis=0))
    of_blocks = tl.load(found + BEST * num_blocks + blocks, mask=inside, other=-float("inf"))
    best = tl.max(of_blocks, axis=0)
    is_finite = tl.abs(raw_best) < float("inf")
    is_left = ((flags & STRUCTURED) != 0) & is_finite
    tl.store(best_logits + row, tl.where(is_left, best, raw_best))
    token = vocab * 0
    is_filtered = (flags & FILTERED) != 0
    if HAS_FILTERS and is_filtered:
        place = tl.load(ints + EDITED_PLACE)
        source = logits + row * row_stride
        edited += tl.maximum(place, 0) * vocab
        is_edited = (place >= 0).to(tl.int32)
        scratch += row * (num_groups + FEW)
        last, num_level, num_hot = keep(
            tl.load(ints + TOP_K).to(tl.int32),
            tl.load(floats + TOP_P),
            tl.load(floats + REACH),
            of_blocks,
            tl.load(found + MASS * num_blocks + blocks, mask=inside, other=0.0),
            group_best + row * num_groups,
            num_groups,
            scratch,
            scratch + num_groups,
            source, edited, is_edited, best, temperature, vocab, GROUPS, TILE, GROUP, FEW,
        )  # fmt: skip
        token = _drawn(
            last, num_level, noise_key, source, edited, is_edited, scratch, num_hot, best,
            temperature, vocab, TILE, GROUP,
        )  # fmt: skip
    if not is_filtered:
        x = tl.load(found + WINNER * num_blocks + blocks, mask=inside, other=-float("inf"))
        won = tl.load(winners + row * num_blocks + blocks, mask=inside, other=0)
        values = x
        if (flags & DRAWN) != 0:
            values = gumbel(noise_key, won) - tl.div_rn(best - x, temperature)
        values = tl.where((x > -float("inf")) & (values == values), values, -float("inf"))
        _, place = tl.max(values, axis=0, return_indices=True)
        token = tl.sum(tl.where(blocks == place, won, 0), axis=0)
    tl.store(token_ids + row, tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64))

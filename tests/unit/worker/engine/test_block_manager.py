"""The three states of a block, drawn in block_manager.py, and the ways between them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from shared.messages import SamplingParams
from worker.engine.block_hash import BlockHash, BlockHasher, block_hash
from worker.engine.block_manager import BlockManager
from worker.engine.errors import IntegrityError
from worker.engine.sequence import Sequence

SIZE = 4


def make_sequence(tokens: Iterable[int], tenant: str = "default") -> Sequence:
    return Sequence(
        seq_id=0,
        request_id="r",
        prompt_token_ids=tuple(tokens),
        params=SamplingParams(),
        max_model_len=10**9,
        tenant=tenant,
    )


def fill(manager: BlockManager, tokens: Iterable[int], tenant: str = "default") -> Sequence:
    """Admits a sequence, computes all of it and publishes what is full."""
    sequence = make_sequence(tokens, tenant)
    assert manager.allocate(sequence, sequence.num_tokens, manager.match(sequence))
    manager.advance(sequence, sequence.num_tokens)
    return sequence


def states(manager: BlockManager) -> tuple[int, int, int]:
    num_owned = manager.num_blocks - manager.num_available
    return manager.num_free, manager.num_cached, num_owned


@pytest.mark.promise(
    "Streaming: a computed prompt stays cached for the next request, without an owner"
)
def test_a_block_goes_from_free_to_owned_to_cached_and_back() -> None:
    manager = BlockManager(3, SIZE)
    assert states(manager) == (3, 0, 0)
    first = fill(manager, range(9))  # two full blocks and one token
    assert states(manager) == (0, 0, 3)
    manager.release(first)
    assert states(manager) == (1, 2, 0)  # only full blocks are worth keeping
    again = make_sequence(range(9))
    assert len(manager.match(again)) == 2
    other = fill(manager, range(100, 112))  # needs all three: the cached ones are evicted
    assert manager.match(again) == []
    manager.check_integrity([other.block_table])


@pytest.mark.promise(
    "Engine: full blocks are shared by chained content hashes, counted, and compared (128 bits, "
    "seeded by the tenant)"
)
def test_two_prompts_sharing_k_full_blocks_share_exactly_k_block_ids() -> None:
    for num_shared in range(4):
        manager = BlockManager(32, SIZE)
        prefix = list(range(num_shared * SIZE))
        a = fill(manager, [*prefix, *range(100, 110)])
        b = fill(manager, [*prefix, *range(200, 210)])
        shared = set(a.block_table) & set(b.block_table)
        assert shared == set(a.block_table[:num_shared])
        assert {manager.ref_count(i) for i in shared} <= {2}
        manager.check_integrity([a.block_table, b.block_table])


def test_the_whole_prompt_is_never_matched() -> None:
    manager = BlockManager(32, SIZE)
    fill(manager, range(12))
    assert len(manager.match(make_sequence(range(12)))) == 2
    assert len(manager.match(make_sequence(range(13)))) == 3


@pytest.mark.promise("Engine: a new block only when the last is full, findable only when full")
@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "num_findable"), [(255, 1, 0), (256, 1, 1), (257, 2, 1)]
)
def test_a_new_block_only_when_the_last_is_full_and_findable_only_when_full(
    num_tokens: int, num_blocks: int, num_findable: int
) -> None:
    manager = BlockManager(8, 256)
    sequence = fill(manager, range(num_tokens))
    assert len(sequence.block_table) == num_blocks
    assert len(manager.match(make_sequence(range(600)))) == num_findable


@pytest.mark.promise(
    "Engine: a shared block is freed with its last owner; its content stays cached"
)
def test_a_shared_block_is_given_up_only_by_its_last_owner() -> None:
    manager = BlockManager(8, SIZE)
    a = fill(manager, range(9))
    b = fill(manager, range(9))
    shared = a.block_table[:2]
    manager.release(a)
    assert [manager.ref_count(i) for i in shared] == [1, 1]
    assert len(manager.match(make_sequence(range(9)))) == 2
    manager.release(b)
    assert [manager.ref_count(i) for i in shared] == [0, 0]
    c = fill(manager, range(9))
    assert c.block_table[:2] == shared
    manager.check_integrity([c.block_table])


def test_the_least_recently_used_content_is_evicted_first_and_suffixes_before_prefixes() -> None:
    manager = BlockManager(6, SIZE)
    old, new = fill(manager, range(12)), fill(manager, range(100, 112))
    manager.release(old)
    manager.release(new)
    fill(manager, [7])
    assert len(manager.match(make_sequence(range(13)))) == 2
    assert len(manager.match(make_sequence(range(100, 113)))) == 3
    hit = fill(manager, range(5))  # uses the old content's first block
    manager.release(hit)
    for token in range(500, 504):
        fill(manager, [token])
    assert len(manager.match(make_sequence(range(13)))) == 1
    assert len(manager.match(make_sequence(range(100, 113)))) == 0


def test_a_refused_allocation_leaves_sequence_and_blocks_as_they_were() -> None:
    manager = BlockManager(4, SIZE)
    manager.release(fill(manager, range(8)))
    blocker = fill(manager, [50])
    sequence = make_sequence(range(17))
    hits = manager.match(sequence)
    assert len(hits) == 2
    before = (states(manager), list(sequence.block_table), manager.match(sequence))
    assert not manager.allocate(sequence, 17, hits)
    assert (states(manager), sequence.block_table, manager.match(sequence)) == before
    manager.check_integrity([blocker.block_table])


def test_a_hit_that_wakes_a_cached_block_uses_up_an_available_one() -> None:
    manager = BlockManager(3, SIZE)
    manager.release(fill(manager, range(12)))
    sequence = make_sequence(range(16))
    hits = manager.match(sequence)
    assert (len(hits), manager.num_available) == (3, 3)
    assert not manager.allocate(sequence, 16, hits)
    assert manager.can_allocate(sequence, 12, hits)
    assert not manager.can_allocate(sequence, 12, hits, spare=1)


def test_block_tables_are_append_only_and_a_released_one_can_still_be_read() -> None:
    manager = BlockManager(8, SIZE)
    sequence = make_sequence(range(20))
    assert manager.allocate(sequence, 3)
    seen = sequence.block_table
    first = list(seen)
    assert manager.allocate(sequence, 20)
    assert seen is sequence.block_table
    assert seen[:1] == first
    whole = list(seen)
    manager.release(sequence)
    assert sequence.block_table == []
    assert seen == whole


def test_the_same_content_computed_twice_becomes_an_alias_that_children_chain_on() -> None:
    manager = BlockManager(16, SIZE)
    a, b = make_sequence(range(13)), make_sequence([*range(8), 90, 91, 92, 93, 94])
    for sequence in (a, b):  # both admitted before either has published
        assert manager.allocate(sequence, 13, manager.match(sequence))
    manager.advance(a, 13)
    manager.advance(b, 13)
    assert set(a.block_table).isdisjoint(b.block_table)
    mixed = make_sequence([*range(8), 90, 91, 92, 93, 94])
    assert manager.match(mixed) == [*a.block_table[:2], b.block_table[2]]
    manager.check_integrity([a.block_table, b.block_table])
    manager.release(b)  # its aliases are free, its own third block is cached
    assert manager.num_cached == 1
    manager.check_integrity([a.block_table])


def test_content_computed_again_after_its_parent_was_evicted_can_be_hit() -> None:
    manager = BlockManager(8, SIZE)
    tokens = list(range(9))
    a, b = make_sequence(tokens), make_sequence(tokens)
    for sequence in (a, b):
        assert manager.allocate(sequence, 9)
    manager.advance(a, 4)  # a publishes the parent, b its child
    manager.advance(b, 8)
    manager.release(a)
    fillers = [fill(manager, [token]) for token in range(100, 105)]  # evicts a's parent
    assert manager.match(make_sequence(tokens)) == []
    for filler in fillers:
        manager.release(filler)
    c = fill(manager, tokens)
    assert manager.match(make_sequence(tokens)) == c.block_table[:2]
    manager.check_integrity([b.block_table, c.block_table])


def test_tenants_do_not_share() -> None:
    manager = BlockManager(16, SIZE)
    fill(manager, range(12), tenant="a")
    assert manager.match(make_sequence(range(12), tenant="b")) == []
    assert len(manager.match(make_sequence(range(12), tenant="a"))) == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager(16, SIZE, prefix_caching=False)
    sequence = fill(manager, range(12))
    assert manager.match(make_sequence(range(13))) == []
    manager.release(sequence)
    assert states(manager) == (16, 0, 0)


def _constant(parent: BlockHash, token_ids: object) -> BlockHash:
    return BlockHash(b"collision")


def _parent_blind(parent: BlockHash, token_ids: Iterable[int]) -> BlockHash:
    return block_hash(BlockHash(b""), list(token_ids))


def _token_blind(parent: BlockHash, token_ids: object) -> BlockHash:
    return block_hash(parent, [])


@pytest.mark.parametrize("hasher", [_constant, _parent_blind, _token_blind])
def test_a_hash_collision_is_a_miss_and_never_a_wrong_block(hasher: BlockHasher) -> None:
    manager = BlockManager(64, SIZE, hasher=hasher)
    common = [7, 7, 7, 7]
    live = [
        fill(manager, [*range(100, 104), *common, *common, 1]),
        fill(manager, [*range(200, 204), *common, *common, 1]),
        fill(manager, [*common, *common, *common, 1]),
    ]
    manager.check_integrity([s.block_table for s in live])
    for first in (range(100, 104), range(200, 204), range(300, 304), common):
        probe = make_sequence([*first, *common, *common, 1])
        owners = [s for s in live if s.token_ids == probe.token_ids]
        hits = manager.match(probe)
        if not owners:
            assert hits == []
        for owner in owners:
            assert hits == owner.block_table[: len(hits)]
    for sequence in live:
        manager.release(sequence)
    manager.check_integrity([])


@pytest.mark.timeout(20)
def test_a_hundred_thousand_blocks_are_no_slower_each_than_ten() -> None:
    """A search through the free blocks would take minutes here."""
    num_blocks = 100_000
    manager = BlockManager(num_blocks, 1)
    sequence = fill(manager, range(num_blocks))
    manager.release(sequence)
    assert manager.num_cached == num_blocks
    again = make_sequence(range(num_blocks))
    hits = manager.match(again)
    assert len(hits) == num_blocks - 1
    assert manager.allocate(again, num_blocks, hits)
    manager.check_integrity([again.block_table])
    manager.release(again)
    other = fill(manager, range(num_blocks, 2 * num_blocks))  # evicts every one
    assert manager.num_available == 0
    manager.check_integrity([other.block_table])


def test_check_integrity_notices_a_lost_reference() -> None:
    manager = BlockManager(4, SIZE)
    sequence = fill(manager, range(6))
    manager.check_integrity([sequence.block_table])
    with pytest.raises(IntegrityError, match="references"):
        manager.check_integrity([])
    with pytest.raises(IntegrityError, match="references"):
        manager.check_integrity([sequence.block_table, sequence.block_table])
    with pytest.raises(IntegrityError, match="twice"):
        manager.check_integrity([[0, 0]])


def windowed(num_blocks: int, window: int = 2 * SIZE, held: int = 4) -> BlockManager:
    return BlockManager(num_blocks, SIZE, windows=(window,), held=held)


def compute(manager: BlockManager, sequence: Sequence) -> set[int]:
    """Computes all tokens of an admitted sequence one by one; returns the blocks that it held."""
    held: set[int] = set()
    for computed in range(sequence.num_published_blocks * SIZE, sequence.num_tokens + 1):
        assert manager.allocate(sequence, computed)
        assert len(sequence.block_table) * SIZE >= computed
        manager.advance(sequence, computed)
        own = manager.held(sequence)
        assert len(own) <= 4
        manager.check_integrity([own])
        held.update(own)
    return held


def test_a_sequence_gives_up_the_blocks_that_its_window_has_left() -> None:
    manager = windowed(4)
    sequence = make_sequence(range(100))  # 25 blocks, out of a pool of four
    assert manager.allocate(sequence, 100)
    assert len(sequence.block_table) == 4
    assert compute(manager, sequence) == {0, 1, 2, 3}
    assert len(sequence.block_table) == 25
    # The query at place 100 reaches the last 2 * SIZE, its own included: from place 93 on.
    assert manager.held(sequence) == sequence.block_table[93 // SIZE :]
    manager.release(sequence)
    assert manager.num_available == 4
    manager.check_integrity([])


def test_a_hit_needs_the_blocks_of_its_last_window_alone() -> None:
    manager = windowed(8)
    first = make_sequence(range(40))
    assert manager.allocate(first, 40)
    compute(manager, first)  # ten blocks in a pool of eight: some of the first are evicted
    manager.release(first)
    second = make_sequence([*range(40), 99])
    hits = manager.match(second)
    assert len(hits) == 10
    assert manager.allocate(second, 41, hits)
    own = manager.held(second)
    assert own[:-1] == first_reached(hits, 40)
    manager.check_integrity([own])
    # Other tokens before the window: its own blocks look the same, and are of another prefix.
    other = make_sequence([98, *range(1, 40), 99])
    assert manager.match(other) == []


def first_reached(hits: list[int], num_computed: int) -> list[int]:
    return hits[(num_computed - 2 * SIZE + 1) // SIZE :]


def test_a_hit_ends_where_a_block_of_its_last_window_is_missing() -> None:
    manager = windowed(16, held=16)
    first = fill(manager, range(40))
    manager.release(first)
    keep = make_sequence(range(24))  # the query at place 20 reaches blocks 3 and 4
    assert manager.allocate(keep, 24, manager.match(keep))
    others = [fill(manager, range(1000 + 10 * i, 1003 + 10 * i)) for i in range(13)]
    assert manager.num_available == 0
    assert len(manager.match(make_sequence(range(41)))) == 5
    for other in others:
        manager.release(other)
    manager.release(keep)
    again = fill(manager, range(40))  # whose content is known by its old name
    assert len(manager.match(make_sequence(range(41)))) == 10
    manager.check_integrity([manager.held(again)])


def test_contents_of_evicted_blocks_are_bounded() -> None:
    manager = windowed(8, held=8)
    for number in range(100):
        manager.release(fill(manager, range(100 * number, 100 * number + 9)))
    assert len(manager._evicted) == 4 * 8


MIXED = (None, 2 * SIZE, 2 * SIZE)


def mixed(num_blocks: int, held: int = 4) -> BlockManager:
    return BlockManager(num_blocks, SIZE, windows=MIXED, held=held)


def test_only_groups_with_a_window_give_their_blocks_up() -> None:
    manager = mixed(25 + 2 * 4)
    sequence = make_sequence(range(100))  # 25 rows, 75 blocks without the windows
    assert manager.allocate(sequence, 100)
    assert (len(sequence.block_table), len(sequence.spare_blocks)) == (3 * 4, 25 - 4)
    assert manager.num_available == 0  # the rest of the prompt is taken already
    for computed in range(1, 101):
        assert manager.tokens_in(sequence.block_table) >= computed
        manager.advance(sequence, computed)
        manager.check_integrity([manager.held(sequence)])
    # The query at place 100 reaches the last 2 * SIZE, its own included: from row 23 on.
    assert len(manager.held(sequence)) == 25 + 2 * 2
    assert (len(sequence.block_table), sequence.spare_blocks) == (75, [])
    manager.release(sequence)
    assert manager.num_available == manager.num_blocks
    manager.check_integrity([])


def test_a_hit_of_mixed_groups_needs_all_blocks_of_some_and_the_last_window_of_others() -> None:
    manager = mixed(40)
    first = make_sequence(range(40))
    assert manager.allocate(first, 40)
    for computed in range(1, 41):
        manager.advance(first, computed)
    own = first.block_table
    manager.release(first)
    blockers = []
    while manager.num_free:
        blockers.append(fill(manager, [1000 + len(blockers)]))  # a row of three
    for _ in range(3):  # evicts what the windows left first: the first rows of their groups
        blockers.append(fill(manager, [1000 + len(blockers)]))
    second = make_sequence([*range(40), 99])
    hits = manager.match(second)
    assert len(hits) == 3 * 10
    assert hits[::3] == own[::3]
    assert [hits[3 * 8 :][i] for i in (0, 1, 2, 3, 4, 5)] == own[3 * 8 :]
    assert manager.allocate(second, 40, hits)
    assert set(manager.held(second)) == {*own[::3], *own[3 * 8 :]}
    manager.check_integrity([*map(manager.held, (second, *blockers))])


def test_mixed_groups_have_no_hit_without_a_whole_last_window() -> None:
    manager = mixed(3 * 10, held=10)
    manager.release(fill(manager, range(40)))
    num_left = 2 * 8  # by the windows: they are evicted first, and no one needs them
    for number in range(num_left // 3):
        fill(manager, [1000 + number])
        assert len(manager.match(make_sequence(range(41)))) == 3 * 10
    fill(manager, [2000])  # takes blocks of the last row, and the windows before it are gone
    assert manager.match(make_sequence(range(41))) == []


def test_rows_of_equal_content_share_all_their_blocks() -> None:
    manager = mixed(30)
    a = fill(manager, range(9))
    b = fill(manager, range(9))
    assert a.block_table[:6] == b.block_table[:6]
    assert set(a.block_table[6:]).isdisjoint(b.block_table[6:])
    manager.check_integrity([manager.held(a), manager.held(b)])

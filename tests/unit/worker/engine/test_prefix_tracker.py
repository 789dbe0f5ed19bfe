"""Which prefixes the engine reports as held: those that a later prompt finds."""

from __future__ import annotations

import pytest

from shared.prefixes import DIGEST_BYTES, PREFIX_STEP, digests_of_prompt
from tests.unit.worker.engine.test_block_manager import fill
from worker.engine.block_manager import BlockManager


def digests(num_tokens: int, first: int = 0) -> list[bytes]:
    joined = digests_of_prompt("default", range(first, first + num_tokens))
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


@pytest.mark.parametrize("block_size", [16, 48, 128, 256])
def test_what_is_computed_is_held_as_far_as_its_blocks_are_full(block_size: int) -> None:
    manager = BlockManager(400, block_size)
    num_tokens = 5 * PREFIX_STEP + 1
    fill(manager, range(num_tokens))
    num_full = num_tokens // block_size * block_size
    assert manager.prefixes.drain() == tuple((one, True) for one in digests(num_full))
    assert manager.prefixes.drain() == ()


def test_what_is_evicted_is_lost_from_its_end_on() -> None:
    manager = BlockManager(16, 64)  # eight steps
    manager.release(fill(manager, range(8 * PREFIX_STEP)))
    manager.prefixes.drain()
    fill(manager, range(10_000, 10_000 + 2 * PREFIX_STEP))
    changes = dict(manager.prefixes.drain())
    assert changes == {
        **dict.fromkeys(digests(2 * PREFIX_STEP, 10_000), True),
        **dict.fromkeys(digests(8 * PREFIX_STEP)[6:], False),
    }


def test_what_came_and_went_between_two_reports_is_not_in_the_next() -> None:
    """So an engine whose changes nobody reads keeps no more of them than it has blocks."""
    manager = BlockManager(4, 64)
    for first in range(0, 100_000, 1000):
        manager.release(fill(manager, range(first, first + 2 * PREFIX_STEP)))
    assert manager.prefixes.drain() == tuple((one, True) for one in digests(256, 99_000))


def test_without_a_prefix_cache_nothing_is_held() -> None:
    manager = BlockManager(16, 64, prefix_caching=False)
    fill(manager, range(4 * PREFIX_STEP))
    assert manager.prefixes.drain() == ()

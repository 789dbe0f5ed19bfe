"""Which prefixes a worker reports for vLLM's events of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from shared.prefixes import DIGEST_BYTES, PREFIX_STEP, digests_of_prompt
from worker.engines.vllm.prefixes import VllmPrefixes

SIZE = 32
NUM_TOKENS = 5 * PREFIX_STEP + 40


@dataclass
class BlockStored:
    """vLLM's event of this name, as far as it is read."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int = SIZE
    extra_keys: Sequence[tuple[object, ...] | None] | None = None
    medium: str = "GPU"
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"
    lora_name: str | None = None


@dataclass
class BlockRemoved:
    """Likewise."""

    block_hashes: Sequence[int]
    medium: str = "GPU"
    group_idx: int = 0


class AllBlocksCleared:
    """Likewise."""


def digests(num_tokens: int, tenant: str = "a") -> list[bytes]:
    joined = digests_of_prompt(tenant, range(num_tokens))
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def stored(first: int, end: int, *, size: int = SIZE, **members: object) -> BlockStored:
    """Blocks `first` to `end`, without the last, of a prompt; a block's hash is its number."""
    event = BlockStored(
        range(first, end), first - 1 if first else None, range(first * size, end * size), size
    )
    if first == 0:
        event.extra_keys = [("a",), *[None] * (end - 1)]
    for name, value in members.items():
        setattr(event, name, value)
    return event


@pytest.mark.parametrize("size", [16, 48, 128, 256])
def test_blocks_of_any_size_give_the_digests_of_the_prompt(size: int) -> None:
    prefixes = VllmPrefixes()
    num_full = NUM_TOKENS // size
    for number in range(num_full):
        prefixes.take([stored(number, number + 1, size=size)])
    assert prefixes.drain() == tuple((one, True) for one in digests(num_full * size))


def test_removed_blocks_are_lost_and_so_are_cleared_ones() -> None:
    prefixes = VllmPrefixes()
    prefixes.take([stored(0, 16)])
    prefixes.drain()
    prefixes.take([BlockRemoved([15]), BlockRemoved([14, 13])])
    assert prefixes.drain() == ((digests(512)[3], False),)
    prefixes.take([AllBlocksCleared()])
    assert dict(prefixes.drain()) == dict.fromkeys(digests(384), False)
    prefixes.take([stored(0, 4)])
    assert prefixes.drain() == ((digests(128)[0], True),)


def test_a_block_that_vllm_has_twice_is_held_until_both_are_gone() -> None:
    prefixes = VllmPrefixes()
    prefixes.take([stored(0, 4), stored(0, 4)])
    prefixes.drain()
    prefixes.take([BlockRemoved([3])])
    assert prefixes.drain() == ()
    prefixes.take([BlockRemoved([3])])
    assert prefixes.drain() == ((digests(128)[0], False),)


@pytest.mark.parametrize(
    "members",
    [
        {"extra_keys": None},
        {"extra_keys": [("adapter", "a"), None, None, None]},
        {"lora_name": "adapter"},
        {"medium": "CPU"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"block_hashes": range(3)},  # a window has left one out
    ],
    ids=str,
)
def test_what_no_prompt_of_a_job_finds_is_left_out(members: dict[str, object]) -> None:
    prefixes = VllmPrefixes()
    prefixes.take([stored(0, 4, **members), stored(4, 8)])
    assert prefixes.drain() == ()


def test_layers_with_windows_beside_others_change_nothing() -> None:
    prefixes = VllmPrefixes()
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    prefixes.take([stored(0, 4, **window), stored(0, 4), BlockRemoved([3], group_idx=1)])
    assert prefixes.drain() == ((digests(128)[0], True),)

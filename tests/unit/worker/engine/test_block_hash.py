from __future__ import annotations

from worker.engine.block_hash import block_hash, root_hash


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    root = root_hash("default")
    first = block_hash(root, [1, 2, 3, 4])
    assert root.hex() == "d831557a6a6e21ead0b1377e45af16f2"
    assert first.hex() == "444aada0e4440f6507b465213fc37a47"
    assert block_hash(first, (5, 6, 7, 8)).hex() == "97934f310966b02a7015f00550519ad4"


def test_the_tenant_seeds_the_chain() -> None:
    assert block_hash(root_hash("a"), [1]) != block_hash(root_hash("b"), [1])


def test_a_hash_covers_everything_before_it() -> None:
    root = root_hash("a")
    assert block_hash(block_hash(root, [1]), [9]) != block_hash(block_hash(root, [2]), [9])


def test_the_largest_token_id_can_be_hashed() -> None:
    assert len(block_hash(root_hash("a"), [0, 2**32 - 1])) == 16

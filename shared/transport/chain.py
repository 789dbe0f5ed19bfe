"""The hash chain over output token ids: two chains are equal when the outputs are."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def chain_hash(previous: str, token_ids: Iterable[int]) -> str:
    """The chain of a prefix, continued by `token_ids`; '' is the chain of the empty prefix."""
    chain = previous
    for token_id in token_ids:
        chain = xxhash.xxh64_hexdigest(f"{chain}/{token_id}".encode("ascii"))
    return chain

"""Prefix digests: names of a prompt's first 128, 256, ... tokens, equal in frontends and engines.

A frontend puts some of a prompt's digests into its queue entry, a worker reports those that its
prefix cache holds, and `pull` compares the two (docs/adr/0030). They only decide where a job goes:
the engine compares tokens. A chain starts at its tenant, as that of the blocks does:

    root   = blake2b("penstock.prefix.1" NUL tenant) [NUL LoRA adapter]
    digest = blake2b(digest before, token ids as little-endian uint32)
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

PREFIX_STEP = 128  # tokens from one digest to the next
DIGEST_BYTES = 8
# Steps back from the last digest of a prompt, and on from its first: a job's digests are at most
# twice as many. Later turns share all but a prompt's end, other prompts only its beginning.
DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64)


def root_digest(tenant: str, adapter: str = "") -> bytes:
    """Returns what a tenant's first digests follow, of the model or of a LoRA adapter."""
    after = f"\x00{adapter}" if adapter else ""
    return _digest(f"penstock.prefix.1\x00{tenant}{after}".encode())


def next_digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the digest after `before`; `token_ids` are the PREFIX_STEP tokens between the two."""
    return _digest(before + _packed(token_ids))


def digests_of_prompt(tenant: str, token_ids: Sequence[int], adapter: str = "") -> bytes:
    """Returns up to 16 digests of a prompt, the shortest prefix first, joined."""
    num_steps = len(token_ids) // PREFIX_STEP
    kept = {*DISTANCES, *(num_steps - 1 - distance for distance in DISTANCES)}
    digest, found = root_digest(tenant, adapter), []
    for step in range(num_steps):
        digest = next_digest(digest, token_ids[step * PREFIX_STEP : (step + 1) * PREFIX_STEP])
        if step in kept:
            found.append(digest)
    return b"".join(found)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()

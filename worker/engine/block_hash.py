"""BlockHash: the name of a full block's content, the same in every process and on every machine.

The content of a block is its tokens *and everything before them*, so a block's hash covers its
parent's hash. The chain of a sequence starts at its tenant, so that equal prompts of two tenants
have different names:

    root = xxh3_128("penstock.block.1" NUL tenant)
    hash = xxh3_128(parent's hash, token ids as little-endian uint32)

xxh3 is fast and not cryptographic. Code that acts on an equal hash compares the tokens too, so that
a collision is a miss and never a wrong answer. If the tokens are not kept, the hash is
secure_block_hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NewType

import xxhash

BlockHash = NewType("BlockHash", bytes)

BlockHasher = Callable[[BlockHash, Sequence[int]], BlockHash]

_ROOT_PREFIX = b"penstock.block.1\x00"


def root_hash(tenant: str) -> BlockHash:
    """Returns the parent of a tenant's first blocks: 16 bytes."""
    return BlockHash(xxhash.xxh3_128_digest(_ROOT_PREFIX + tenant.encode("utf-8")))


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Returns the hash of a full block after `parent`: 16 bytes. Ids are in [0, 2**32)."""
    return BlockHash(
        xxhash.xxh3_128_digest(parent + struct.pack(f"<{len(token_ids)}I", *token_ids))
    )


def secure_block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Returns as block_hash does, by BLAKE2b: no client can make two prompts with the same name."""
    content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
    return BlockHash(hashlib.blake2b(content, digest_size=16).digest())

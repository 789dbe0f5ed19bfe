"""Ids of tool calls: unique, and the same whenever the same answer is told again."""

from __future__ import annotations

import hashlib
import secrets

_BYTES = 12


def call_id(seed: str, choice: int, call: int) -> str:
    """`call_` and 24 hexadecimal digits."""
    told = hashlib.blake2b(f"{seed}/{choice}/{call}".encode(), digest_size=_BYTES)
    return f"call_{told.hexdigest()}"


def random_seed() -> str:
    """For an answer that is told once."""
    return secrets.token_hex(_BYTES)

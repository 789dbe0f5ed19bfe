"""Duplicates: which of a million ids come twice, in eight bytes for each.

The first pass keeps a hash of each id; ids whose hashes are equal are compared in a second pass, so
that none is accused wrongly.
"""

from __future__ import annotations

import secrets
from array import array

import xxhash

BUCKETS = 1024  # a set is made of one of them at a time


class IdHashes:
    """The first pass."""

    def __init__(self) -> None:
        self._seed = secrets.randbits(63)  # whoever writes the ids cannot make them collide
        self._buckets = [array("Q") for _ in range(BUCKETS)]

    def add(self, custom_id: str) -> None:
        value = self.hash_of(custom_id)
        self._buckets[value % BUCKETS].append(value)

    def hash_of(self, custom_id: str) -> int:
        return xxhash.xxh3_64_intdigest(custom_id.encode(errors="surrogatepass"), seed=self._seed)

    def repeated(self, limit: int) -> frozenset[int]:
        """At most `limit` of the hashes that came more than once."""
        found: set[int] = set()
        for bucket in self._buckets:
            seen: set[int] = set()
            if len(set(bucket)) == len(bucket):
                continue
            for value in bucket:
                if value in seen and len(found) < limit:
                    found.add(value)
                seen.add(value)
        return frozenset(found)


class Repetitions:
    """The second pass: of the ids with these hashes, the lines that repeat an earlier one."""

    def __init__(self, hashes: IdHashes, repeated: frozenset[int]) -> None:
        self._hashes = hashes
        self._repeated = repeated
        self._first: dict[str, int] = {}

    def first_line_of(self, custom_id: str, line: int) -> int | None:
        """The earlier line with this id; None when this is the first, or not one of these."""
        if self._hashes.hash_of(custom_id) not in self._repeated:
            return None
        first = self._first.setdefault(custom_id, line)
        return None if first == line else first

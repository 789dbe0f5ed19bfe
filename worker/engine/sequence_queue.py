"""SequenceQueue: sequences in the order of a policy's ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from worker.engine.policy import Rank, SchedulingPolicy
from worker.engine.sequence import Sequence


class SequenceQueue:
    """Always sorted. Search is O(log n), a change moves n pointers; n is at most a few thousand."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._rank = policy.rank
        self._sequences: list[Sequence] = []
        self._ranks: list[Rank] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        rank = self._rank(sequence)
        i = bisect_left(self._ranks, rank)
        self._ranks.insert(i, rank)
        self._sequences.insert(i, sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence must be there."""
        i = bisect_left(self._ranks, self._rank(sequence))
        assert self._sequences[i] is sequence
        del self._ranks[i]
        del self._sequences[i]

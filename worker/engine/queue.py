"""SequenceQueue: sequences in the order of a policy's ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # policies rank requests of ENGINE=vllm too, whose interpreter has no xxhash
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
        """Removes a sequence. The caller knows that it is in the queue."""
        i = bisect_left(self._ranks, self._rank(sequence))
        assert self._sequences[i] is sequence
        del self._ranks[i]
        del self._sequences[i]


# Scheduling policies. A policy is the rank of a sequence.
#
# Waiting sequences are admitted, and running ones are served, from the smallest rank up; when
# blocks run out, the running sequence with the largest rank is preempted. So a preempted sequence
# keeps its place before later ones without a special rule.
#
# To add a policy, write a class with `rank` and name it in POLICIES.

Rank = tuple[int, ...]

HIGHEST_PRIORITY = 0


class Schedulable(Protocol):
    """What ranks and shares look at: a Sequence, or a request in front of another scheduler."""

    @property
    def seq_id(self) -> int: ...  # by arrival, unique in the engine's life
    @property
    def tenant(self) -> str: ...
    @property
    def job_id(self) -> str: ...

    priority: int
    num_lane_preemptions: int  # see running_slots.py


class SchedulingPolicy(Protocol):
    def rank(self, sequence: Schedulable) -> Rank:
        """Returns the rank; the smallest is served first. Unique, and constant while a sequence is
        in a queue."""
        ...


class FirstComeFirstServed:
    """By arrival alone: `priority` has no effect."""

    def rank(self, sequence: Schedulable) -> Rank:
        return (sequence.seq_id,)


class HighestPriorityFirst:
    """Smaller `priority` first, equal ones by arrival."""

    def rank(self, sequence: Schedulable) -> Rank:
        return (sequence.priority, sequence.seq_id)


POLICIES: Mapping[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": HighestPriorityFirst,
}


def make_policy(name: str) -> SchedulingPolicy:
    """Returns the policy of that name. Raises ValueError naming the known policies."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}, known are: {', '.join(sorted(POLICIES))}")
    return policy()

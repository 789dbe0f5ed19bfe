"""Who goes first. A policy is one number series: the rank of a sequence.

Waiting sequences are admitted, and running ones are served, from the smallest rank up; when blocks
run out, the running sequence with the largest rank gives its own back. So a preempted sequence is
ahead of everybody it was ahead of before: no rule of its own puts it at the head of the queue.

To add a policy, write a class with `rank` and name it in POLICIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from worker.engine.sequence import Sequence

Rank = tuple[int, ...]


class SchedulingPolicy(Protocol):
    def rank(self, sequence: Sequence) -> Rank:
        """Smaller goes first. Unique among live sequences, and the same for a sequence's life."""
        ...


class FirstComeFirstServed:
    """By arrival alone: `priority` has no effect."""

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.seq_id,)


class HighestPriorityFirst:
    """Smaller `priority` first, equal ones by arrival. The last may wait as long as others come."""

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.priority, sequence.seq_id)


POLICIES: Mapping[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": HighestPriorityFirst,
}


def make_policy(name: str) -> SchedulingPolicy:
    """Raises ValueError naming the policies there are."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}, known are: {', '.join(sorted(POLICIES))}")
    return policy()

"""The seeds of a job's choices: one of the job's own, the others mixed from it."""

from __future__ import annotations

from shared.messages import MIN_SEED

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_MASK = 2**64 - 1


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Choice 0 has the job's seed; choice k the k-th output of SplitMix64 begun at it, less 2**63.

    (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.) None, which
    only greedy sampling may have, stays None.
    """
    if seed is None or choice == 0:
        return seed
    mixed = (seed + choice * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) + MIN_SEED

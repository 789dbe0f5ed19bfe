"""How many partitions a deployment has, and what belongs to each (docs/adr/0078)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from shared.keys import MAX_PARTITIONS, partition_of

_TEXT = re.compile(r"([1-9][0-9]?)(?:\+([1-9][0-9]?))?")


class PartitionCount(NamedTuple):
    """How many partitions a deployment has: the first `num_new` get its new jobs, further ones are
    read and drained. As text "4" or, with drained ones, "1+3"."""

    num_new: int = 1
    num_drained: int = 0

    @property
    def total(self) -> int:
        return self.num_new + self.num_drained

    @classmethod
    def parse(cls, text: str) -> PartitionCount:
        """Raises ValueError with a sentence."""
        match = _TEXT.fullmatch(text)
        count = cls(int(match[1]), int(match[2] or 0)) if match else None
        if count is None or count.total > MAX_PARTITIONS:
            raise ValueError(
                f"is a number like 4, or like 1+3 with three more to be drained, at most "
                f"{MAX_PARTITIONS} together"
            )
        return count


def by_partition(job_ids: Iterable[str]) -> dict[int, list[int]]:
    """Returns the indexes of ids, by their partitions."""
    found: dict[int, list[int]] = {}
    for index, job_id in enumerate(job_ids):
        found.setdefault(partition_of(job_id), []).append(index)
    return found

"""ModelOffers: the models that workers can load, and which of them one is about to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """The work that waits for one model of a worker's list."""

    model: str
    num_waiting: int  # jobs; 0 while its queue is paused
    oldest_ms: int  # that the oldest of them has waited
    num_workers: int = 0  # others that serve it and take jobs
    is_claimed: bool = False  # another worker is about to load it


class ModelOffers(Protocol):
    """Every call may raise TransportError."""

    async def offer(
        self,
        worker_id: str,
        models: Sequence[str],
        *,
        life_ms: int,
        bound_ms: int,
        swap_ms: int,
        claimed: str = "",
    ) -> Sequence[WaitingModel]:
        """Offers the models for `life_ms`, and renews the claim of `claimed`.

        `bound_ms`: how long the jobs of a model wait before this worker leaves the one that it
        serves; `swap_ms`: how long loading another takes.
        """
        ...

    async def claim(self, worker_id: str, model: str, life_ms: int, *, unserved: bool) -> bool:
        """Returns whether this worker, and no other one, is to load the model; with `unserved` only
        while no other one serves it."""
        ...

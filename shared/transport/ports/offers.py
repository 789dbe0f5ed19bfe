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
    num_workers: int = 0  # that serve it and take jobs
    is_claimed: bool = False  # another worker loads it
    is_drained_for: bool = False  # another worker is to load it, and still runs jobs of its own


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
        failed: Sequence[str] = (),
    ) -> Sequence[WaitingModel]:
        """Offers the models for `life_ms`, and renews the claim of `claimed`. `failed`: models that
        could not be loaded.

        `bound_ms`: how long the jobs of a model wait before this worker leaves the one that it
        serves; `swap_ms`: how long loading another takes.
        """
        ...

    async def claim(
        self, worker_id: str, model: str, life_ms: int, *, unserved: bool, drains: bool
    ) -> bool:
        """Returns whether this worker, and no other one, is to load the model; with `unserved` only
        while none serves it. `drains`: it still runs jobs, and loses its claim to a worker that
        does not."""
        ...

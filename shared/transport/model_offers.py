"""ModelOffers over Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shared.redis.connections import Connections
from shared.transport.failures import translated
from shared.transport.ports.offers import WaitingModel
from shared.transport.ports.registry import Offer
from shared.transport.scripts import Argument, Scripts


class RedisModelOffers:
    """Implements ModelOffers."""

    def __init__(self, connections: Connections, scripts: Scripts) -> None:
        self._connections = connections
        self._scripts = scripts

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
        own = (worker_id, life_ms, bound_ms, swap_ms, claimed, msgspec.json.encode(failed))
        arguments: tuple[Argument, ...] = (*own, *models)
        with translated("offer"):
            rows = await self._scripts.call(self._connections.scripts, "offer", *arguments)
        return [
            WaitingModel(model, num_waiting, oldest_ms, num_workers, claim == 1, claim == 2)
            for model, (num_waiting, oldest_ms, num_workers, claim) in zip(
                models, rows, strict=True
            )
        ]

    async def claim(
        self, worker_id: str, model: str, life_ms: int, *, unserved: bool, drains: bool
    ) -> bool:
        arguments: tuple[Argument, ...] = (worker_id, model, life_ms, int(unserved), int(drains))
        with translated("swap"):
            is_claimed: int = await self._scripts.call(
                self._connections.scripts, "swap", *arguments
            )
        return is_claimed == 1


class _Stored(msgspec.Struct):
    """What lua/offer.lua stores of one worker."""

    until_ms: float
    waits_ms: dict[str, float]
    loading: str = ""
    failed: str = "[]"  # JSON: cjson writes an empty list as an object


def offered_models(
    fields: Mapping[bytes, bytes], now_ms: int
) -> tuple[dict[str, Offer], frozenset[str]]:
    """Returns the models of all workers' offers, each with the shortest wait, and the models that
    one of these workers failed to load."""
    offers: dict[str, Offer] = {}
    failed: set[str] = set()
    for value in fields.values():
        try:
            stored = msgspec.json.decode(value, type=_Stored)
            failed_here = msgspec.json.decode(stored.failed, type=list[str])
        except msgspec.MsgspecError:  # of another release
            continue
        if now_ms > stored.until_ms:
            continue
        failed.update(failed_here)
        for model, wait_ms in stored.waits_ms.items():
            other = offers.get(model)
            wait_s = min(wait_ms / 1000, other.wait_s) if other else wait_ms / 1000
            is_loading = model == stored.loading or (other is not None and other.is_loading)
            offers[model] = Offer(wait_s, is_loading)
    return offers, frozenset(failed)

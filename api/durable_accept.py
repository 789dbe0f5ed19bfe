"""DurableAccept: a job or a batch is accepted when its record is as durable as requested."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from api.errors import unavailable
from shared.messages import Durability, InvalidParameter
from shared.transport.base import JobStore, TransportError

log = logging.getLogger(__name__)


class NotConfirmed(TransportError):
    """The record is not known to be as durable as requested; it may be there, or not."""


class DurableAccept:
    """`default`: for requests that set none. `num_replicas`: confirm `Durability.REPLICAS`."""

    def __init__(
        self, store: JobStore, default: Durability, num_replicas: int, timeout_s: float
    ) -> None:
        self._store = store
        self.default = default
        self._num_replicas = num_replicas
        self._timeout_s = timeout_s

    async def check(self, durability: Durability) -> None:
        """Checks before anything is written. Raises InvalidParameter where a request needs what the
        server cannot do at all, UnavailableError where the server cannot do it now, or the setting
        requires it."""
        if durability is Durability.NONE:
            return
        fault = await self._store.durability_fault(durability, self._num_replicas)
        if fault is None:
            return
        if fault.is_lasting and durability is not self.default:
            raise InvalidParameter("durability", f"cannot be '{durability}' here: {fault.sentence}")
        raise unavailable(f"Nothing is accepted as '{durability}' at the moment: {fault.sentence}")

    async def confirm(self, kind: str, names: Sequence[str], durability: Durability) -> None:
        """Returns when the record of each "job" or "batch" is there. Raises NotConfirmed when that
        was not in time, and TransportError."""
        if durability is Durability.NONE:
            return
        is_there = await self._store.confirm(
            kind, names, durability, self._num_replicas, self._timeout_s
        )
        if not is_there:
            log.warning("not confirmed", extra={"record": names[0], "durability": str(durability)})
            raise NotConfirmed(
                f"Nothing was accepted: the job store did not confirm '{durability}' within "
                f"{self._timeout_s:g} s. Try again."
            )

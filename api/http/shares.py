"""Pot: a bounded amount of one frontend's means, divided between tenants as the queue is.

The rule is that of shared/transport/lua/submit.lua: a tenant may have a share
(PENSTOCK_MAX_QUEUE_SHARE_PER_TENANT) of the part that is its own or free, and the last tenth is
reserved for tenants that have little. Operators may use a fiftieth beyond the limit, so that they
can inspect a full frontend. A pot is checked before the work that it bounds.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from api.errors import UnavailableError, overloaded, share_exceeded

SHARE = 0.75
RESERVED, LITTLE, FOR_OPERATORS = 1 / 10, 1 / 200, 1 / 50  # of the limit
RETRY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Payer:
    """The tenant whose share the running task uses. Operators pay from their own reserve."""

    tenant: str
    is_operator: bool = False


# None: outside of requests, or without keys, where all requests have the whole pot.
payer: ContextVar[Payer | None] = ContextVar("payer", default=None)


def paying_tenant() -> str:
    """Returns the tenant of the running request; "" without one."""
    of = payer.get()
    return "" if of is None else of.tenant


class Pot:
    """At most `limit` of something at once, for all and for each tenant. On one event loop.

    `what`: names it in errors, in the plural. `full`: the sentence of a full pot. `always`: this
    many takers are admitted regardless of the amount. `share` 1: neither a share nor a reserve.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        share: float = SHARE,
        *,
        what: str,
        full: str,
        retry_after_s: float = RETRY_AFTER_S,
        always: int = 0,
    ) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self.num_takers = 0
        self.num_refused = 0
        self._share = share
        self._what = what
        self._full = full
        self._retry_after_s = retry_after_s
        self._always = always
        self.held: dict[Payer | None, int] = {}  # by each payer

    def check(self, amount: int, of: Payer | None) -> None:
        """Raises UnavailableError where `amount` more may not be taken: 429 for the payer's own
        share, 503 for a full pot."""
        if self._is_over_share(amount, of):
            self.num_refused += 1
            raise share_exceeded(self._what, self._retry_after_s)
        if self.num_takers < self._always:
            return
        room = self.limit
        if of is not None and of.is_operator:
            room += math.ceil(self.limit * FOR_OPERATORS)
        if self.used + amount > room:
            self.num_refused += 1
            raise self._full_error()

    def take(self, amount: int = 1) -> Charge:
        """Takes from the pot until the charge is given back. Raises as `check`."""
        of = payer.get()
        self.check(amount, of)
        self.num_takers += 1
        charge = Charge(self, of)
        charge.add(amount)
        return charge

    def add(self, of: Payer | None, amount: int) -> None:
        """Counts `amount`, negative to give back. For Charge."""
        self.used += amount
        held = self.held.get(of, 0) + amount
        if held:
            self.held[of] = held
        else:
            self.held.pop(of, None)  # a tenant that has nothing leaves nothing

    def _is_over_share(self, amount: int, of: Payer | None) -> bool:
        own = self.held.get(of, 0)
        if of is None or self._share >= 1 or own <= 0 or own + amount <= self.limit * LITTLE:
            return False
        left = self.limit - self.used - amount
        is_reserved = left < math.floor(self.limit * RESERVED)
        return is_reserved or own + amount > self._share * (own + amount + left)

    def _full_error(self) -> UnavailableError:
        return overloaded(self._full, self._retry_after_s)


class Charge:
    """What one taker has of a pot. A context manager; `give` is idempotent."""

    def __init__(self, pot: Pot, of: Payer | None) -> None:
        self.amount = 0
        self._pot = pot
        self._of = of
        self._is_open = True

    def grow(self, amount: int) -> None:
        """Takes more. Raises as `Pot.take`; the earlier amount stays taken then."""
        self._pot.check(amount, self._of)
        self.add(amount)

    def add(self, amount: int) -> None:
        """Takes more, or gives a part back, whatever is left."""
        if self._is_open:
            self.amount += amount
            self._pot.add(self._of, amount)

    def give(self) -> None:
        """Gives everything back."""
        if self._is_open:
            self.add(-self.amount)
            self._is_open = False
            self._pot.num_takers -= 1

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: Any) -> None:
        self.give()

"""A pot is divided between tenants as the queue is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.errors import UnavailableError
from api.http.shares import Charge, Payer, Pot, payer
from api.system.metrics import pot_report


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    token = payer.set(None)
    yield
    payer.reset(token)


def pot_of(limit: int, share: float = 0.75, always: int = 0) -> Pot:
    return Pot("places", limit, share, what="places", full="Full.", always=always)


def fill(pot: Pot, of: Payer | None, amount: int = 1) -> tuple[list[Charge], str | None]:
    """Takes until it is refused. Returns the charges and the code of the refusal."""
    payer.set(of)
    charges: list[Charge] = []
    while True:
        try:
            charges.append(pot.take(amount))
        except UnavailableError as error:
            return charges, error.code


def test_without_keys_the_whole_pot_is_everybodys() -> None:
    charges, code = fill(pot_of(100), None)
    assert (len(charges), code) == (100, "server_overloaded")


def test_a_tenant_has_its_share_and_the_last_tenth_is_for_those_with_nothing() -> None:
    pot = pot_of(400)
    charges, code = fill(pot, Payer("first"))
    assert (len(charges), code) == (300, "tenant_share_exceeded")
    second, code = fill(pot, Payer("second"))
    assert (len(second), code) == (60, "tenant_share_exceeded"), "a tenth is left"
    others = [fill(pot, Payer(f"tenant {number}")) for number in range(20)]
    assert [len(taken) for taken, _ in others] == [2] * 20, "little is 1/200"
    charges[0].give()
    charges[0].give()
    assert pot.used == 399
    for charge in (*charges, *second, *(one for taken, _ in others for one in taken)):
        charge.give()
    assert (pot.used, pot.num_takers, pot_report(pot).holders) == (0, 0, [])


def test_a_full_pot_is_a_503_and_operators_have_a_reserve() -> None:
    pot = pot_of(100, share=1)
    fill(pot, Payer("first"))
    assert fill(pot, Payer("second")) == ([], "server_overloaded")
    looks, code = fill(pot, Payer("first", is_operator=True))
    assert (len(looks), code) == (2, "server_overloaded")
    assert pot_report(pot).holders == [("first", 102)]
    assert pot_report(pot).refused == 3


def test_a_tenant_with_nothing_may_take_much_and_grow_within_its_share() -> None:
    pot = pot_of(1000)
    payer.set(Payer("first"))
    charge = pot.take(900)
    with pytest.raises(UnavailableError) as refused:
        charge.grow(1)
    assert refused.value.status == 429
    assert "places" in refused.value.message
    charge.add(-400)
    charge.grow(100)
    assert pot.used == charge.amount == 600


def test_so_many_takers_are_always_let_in() -> None:
    pot = pot_of(10, always=1)
    payer.set(Payer("first"))
    with pot.take(99):
        payer.set(Payer("second"))
        with pytest.raises(UnavailableError) as full:
            pot.take(1)
        assert full.value.status == 503
    assert pot.used == 0

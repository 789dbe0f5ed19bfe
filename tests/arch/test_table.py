"""A table of cases in one test fails with the names of the cases that fail, and of no other."""

from __future__ import annotations

import inspect

import pytest

from tests.support.table import table

SEEN: list[tuple[str, int, int]] = []


@table(("b", "c"), [(1, 2), (3, 4), (5, 6)])
@table("a", "xy")
def cases(capsys: object, a: str, b: int, c: int) -> None:
    SEEN.append((a, b, c))
    assert (a, b) != ("y", 3)
    assert b != 5


@table("a", [1, 2])
async def waiting(a: int) -> None:
    assert a != 2


def test_every_case_is_run_and_those_that_fail_are_named() -> None:
    SEEN.clear()
    assert list(inspect.signature(cases).parameters) == ["capsys"]
    with pytest.raises(ExceptionGroup, match="2 of 3 cases failed") as failed:
        cases(capsys=None)
    assert [(a, b, c) for b, c in ((1, 2), (3, 4), (5, 6)) for a in "xy"] == SEEN
    one, both = failed.value.exceptions
    assert one.__notes__ == ["case: a='y'", "case: b=3, c=4"]
    assert both.__notes__ == ["case: b=5, c=6"]
    assert isinstance(both, ExceptionGroup)
    assert [error.__notes__ for error in both.exceptions] == [["case: a='x'"], ["case: a='y'"]]


async def test_cases_that_wait_are_awaited() -> None:
    assert inspect.iscoroutinefunction(waiting)
    with pytest.raises(AssertionError) as failed:
        await waiting()
    assert failed.value.__notes__ == ["case: a=2"]


def test_a_table_without_cases_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="without a case"):
        table("a", [])

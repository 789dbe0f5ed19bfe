"""The collector rests inside the block; what is there at its end is not looked through again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shared.collector import resting


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    yield
    if not frozen:
        gc.unfreeze()
    gc.enable()


def test_rests_inside_and_leaves_out_what_was_made() -> None:
    before = gc.get_freeze_count()
    with resting():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
    assert not any(tracked is made for tracked in gc.get_objects())


def test_it_continues_after_an_error() -> None:
    with pytest.raises(ImportError), resting():
        raise ImportError
    assert gc.isenabled()

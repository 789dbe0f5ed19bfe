"""A view's events: whoever applies them has what the view shows."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from api.deployment.view import Content, View
from api.http.time_slices import TimeSlices


class Reader:
    """What a dashboard does with the events of a view."""

    def __init__(self) -> None:
        self.version = 0
        self.objects: dict[str, Any] = {}
        self.lists: dict[str, dict[str, Any]] = {}
        self.kinds: list[str] = []

    def take(self, view: View) -> int:
        """Returns the length of what it took."""
        message = view.message_since(self.version)
        self.version = view.version
        kind_line, data_line, *rest = message.decode().split("\n")
        assert rest == ["", ""]
        kind = kind_line.removeprefix("event: ")
        told = json.loads(data_line.removeprefix("data: "))
        lists = told.pop("lists")
        if kind == "snapshot":
            self.objects, self.lists = {}, {}
        self.objects |= told
        for name, part in lists.items():
            known = {**self.lists.get(name, {}), **part["rows"]}
            self.lists[name] = {i: known[i] for i in part.get("ids", self.lists.get(name, {}))}
        self.kinds.append(kind)
        return len(message)


def content(rng: random.Random) -> Content:
    rows = [(str(number), {"value": rng.randrange(3)}) for number in range(8)]
    shown = rng.sample(rows, rng.randrange(8))
    return Content({"service": {"n": rng.randrange(2)}}, {"jobs": shown, "workers": rows[:2]})


@pytest.mark.promise(
    "Dashboard: a reader that missed changes has the whole state with the next event"
)
async def test_who_applies_the_events_has_what_is_shown_however_many_it_missed() -> None:
    rng = random.Random(7)
    view, slices = View(), TimeSlices()
    every, some = Reader(), Reader()
    for _ in range(300):
        now = content(rng)
        await view.update(now, slices)
        for reader in (every, some):
            if reader is every or rng.random() < 0.4:
                if reader.version != view.version:
                    reader.take(view)
                assert reader.objects == now.objects
                shown = {name: list(rows.items()) for name, rows in reader.lists.items()}
                assert shown == {name: list(rows) for name, rows in now.lists.items()}
    assert every.kinds.count("snapshot") == 1
    assert {"snapshot", "change"} == set(some.kinds)
    assert some.kinds.count("snapshot") > 1


async def test_unchanged_rows_are_not_sent_again() -> None:
    view, slices = View(), TimeSlices()
    rows = [(str(number), {"text": "x" * 500}) for number in range(50)]
    await view.update(Content({"service": {"n": 1}}, {"jobs": rows}), slices)
    reader = Reader()
    num_first = reader.take(view)
    await view.update(Content({"service": {"n": 1}}, {"jobs": list(rows)}), slices)
    assert view.version == reader.version
    rows[3] = ("3", {"text": "y"})
    await view.update(Content({"service": {"n": 1}}, {"jobs": rows}), slices)
    assert reader.take(view) < num_first / 100
    assert reader.lists["jobs"]["3"] == {"text": "y"}
    await view.update(Content({"service": {"n": 2}}), slices)  # the store is away
    reader.take(view)
    assert len(reader.lists["jobs"]) == 50
    assert reader.objects == {"service": {"n": 2}}


async def test_a_reader_waits_until_there_is_news_or_its_time_is_up() -> None:
    view, slices = View(), TimeSlices()
    await view.wait(0, 0.001)
    waiting = asyncio.create_task(view.wait(0, 60))
    await asyncio.sleep(0)
    await view.update(Content({"service": 1}), slices)
    await asyncio.wait_for(waiting, 10)
    await view.wait(0, 60)  # it has news already

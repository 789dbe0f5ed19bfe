"""View: the state of the dashboard that several viewers share, as bytes and as changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from api.http.sse import json_bytes
from api.http.time_slices import TimeSlices
from shared.transport.ports.job_search import JobFilter

ALL_JOBS = JobFilter()

HistoryRange = Literal["hour", "day", "none"]


@dataclass(frozen=True, slots=True)
class ViewKey:
    """Who looks, and at what: the lists, with the jobs of a filter; or at one job.

    `scope`: the tenant whose jobs the reader may see; None: all. `tenant`: the reader's own.
    `is_operator`: the numbers of the whole deployment are shown; else the tenant's own. `history`:
    how much of it.
    """

    scope: str | None
    tenant: str
    jobs: JobFilter = ALL_JOBS
    job_id: str | None = None
    is_operator: bool = True
    history: HistoryRange = "hour"


Rows = Sequence[tuple[str, Any]]  # ids with the data shown, in order


@dataclass(slots=True)
class Content:
    """The data of a view now: single objects, and lists of rows, by their names."""

    objects: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, Rows] = field(default_factory=dict)


class _List(NamedTuple):
    ids: tuple[str, ...] | None  # in order; None: as before
    rows: Mapping[str, bytes]


class _State(NamedTuple):
    """Encoded content, or a change of it."""

    objects: Mapping[str, bytes]
    lists: Mapping[str, _List]


class View:
    """Follows contents by number: a reader that has the last one gets the change, others all of it.

    A reader that is slow misses contents in between and holds nothing up.
    """

    def __init__(self) -> None:
        self.version = 0
        self._state = _State({}, {})
        self._change = self._state
        self._messages: dict[str, bytes] = {}  # of this version, once encoded
        self._changed = asyncio.Event()

    async def update(self, content: Content, slices: TimeSlices) -> None:
        """Replaces what `content` names; nothing is sent where nothing is different."""
        encoded: dict[str, _List] = {}

        def steps() -> Iterator[None]:
            for name, items in content.lists.items():
                rows: dict[str, bytes] = {}
                for row_id, shown in items:
                    rows[row_id] = json_bytes(shown)
                    yield
                encoded[name] = _List(tuple(rows), rows)

        await slices.run(steps())
        objects = {name: json_bytes(value) for name, value in content.objects.items()}
        before = self._state
        change = _State(
            {name: value for name, value in objects.items() if before.objects.get(name) != value},
            {name: new for name, now in encoded.items() if (new := _news(before.lists, name, now))},
        )
        if not (change.objects or change.lists):
            return
        self._state = _State({**before.objects, **objects}, {**before.lists, **encoded})
        self._change = change
        self._messages.clear()
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def message_since(self, version: int) -> bytes:
        """Returns an event for a reader that has `version`, of 0: nothing."""
        kind = "change" if version and version == self.version - 1 else "snapshot"
        if kind not in self._messages:
            self._messages[kind] = _event(kind, self._change if kind == "change" else self._state)
        return self._messages[kind]

    async def wait(self, version: int, timeout_s: float) -> None:
        """Returns when there is another version than this, or after `timeout_s`."""
        if self.version == version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()


def _news(before: Mapping[str, _List], name: str, now: _List) -> _List | None:
    """Returns the difference of a list; None: no change."""
    old = before.get(name)
    if old is None:
        return now
    rows = {row_id: row for row_id, row in now.rows.items() if old.rows.get(row_id) != row}
    ids = None if now.ids == old.ids else now.ids
    return _List(ids, rows) if rows or ids is not None else None


def _event(kind: str, state: _State) -> bytes:
    lists = {
        name: _object(
            {
                **({} if part.ids is None else {"ids": json_bytes(part.ids)}),
                "rows": _object(part.rows),
            }
        )
        for name, part in state.lists.items()
    }
    data = _object({**state.objects, "lists": _object(lists)})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _object(members: Mapping[str, bytes]) -> bytes:
    """Returns a JSON object of encoded values."""
    return b"{" + b",".join(json_bytes(name) + b":" + v for name, v in members.items()) + b"}"

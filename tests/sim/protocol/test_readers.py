"""Who reads a job, in every order of steps: attach, detach, orphan and reap on one plain job.

Its caller reads at frontend 0, somebody reads along at frontend 1. Time is counted in seconds in
which every living reader says that it is there: the grace lasts two of them at the least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import pytest

CALLER, TAIL = 0, 1  # each at the frontend of its number
NOBODY = -1
GRACE = 2  # seconds; three in truth, less what a slow frontend takes
LIVE, CANCELLED, ORPHANED = "live", "cancelled", "orphaned"


class Bug(StrEnum):
    NO_GRACE = "a job is orphaned as soon as its marked frontend's lease has ended"
    ATTACH_DISPLACES = (
        "whoever comes gets the mark, and a reader that is there does not say so again"
    )
    ATTACH_KEEPS_CLOCK = "a reader that says that it is there does not stop the clock"
    TAIL_CANCELS = "who reads along cancels the job by leaving"
    NOBODY_LOOKS = "no one looks for orphans"


class World(NamedTuple):
    state: str
    mark: int
    clock: int  # seconds until it is an orphan; NOBODY: it does not run
    reading: tuple[bool, bool]  # by reader
    alive: tuple[bool, bool]  # by frontend
    lease: tuple[bool, bool]
    attached: tuple[bool, bool]  # has said so in this second


FIRST = World(LIVE, CALLER, NOBODY, (True, True), (True, True), (True, True), (False, False))


def steps(world: World, bug: Bug | None) -> Iterator[tuple[str, World]]:
    if world.state != LIVE:
        return
    for reader in (CALLER, TAIL):
        if _reads(world, reader):
            if reader in _speaking(bug):
                yield f"attach {reader}", _attached(world, reader, bug)
            yield f"leave {reader}", _left(world, reader, bug)
        if world.alive[reader]:
            yield f"kill {reader}", world._replace(alive=_with(world.alive, reader, False))
        elif world.lease[reader]:
            yield f"lease ends {reader}", world._replace(lease=_with(world.lease, reader, False))
    if bug is not Bug.NOBODY_LOOKS:
        yield "look", _looked_at(world, bug)
    silent = [r for r in _speaking(bug) if _reads(world, r) and not world.attached[r]]
    if not silent:
        clock = max(0, world.clock - 1) if world.clock != NOBODY else NOBODY
        yield "a second", world._replace(clock=clock, attached=(False, False))


def _attached(world: World, reader: int, bug: Bug | None) -> World:
    said = world._replace(attached=_with(world.attached, reader, True))
    if bug is Bug.ATTACH_DISPLACES:
        return said._replace(mark=reader, clock=NOBODY)
    takes_over = world.clock != NOBODY or not world.lease[world.mark]
    clock = world.clock if bug is Bug.ATTACH_KEEPS_CLOCK else NOBODY
    return said._replace(mark=reader if takes_over else world.mark, clock=clock)


def _left(world: World, reader: int, bug: Bug | None) -> World:
    gone = world._replace(reading=_with(world.reading, reader, False))
    cancels = reader == CALLER or bug is Bug.TAIL_CANCELS
    return gone._replace(state=CANCELLED) if cancels else gone


def _looked_at(world: World, bug: Bug | None) -> World:
    if world.clock == 0:
        return world._replace(state=ORPHANED)
    if world.clock == NOBODY and not world.lease[world.mark]:
        if bug is Bug.NO_GRACE:
            return world._replace(state=ORPHANED)
        return world._replace(clock=GRACE)
    return world


def _speaking(bug: Bug | None) -> tuple[int, ...]:
    return (TAIL,) if bug is Bug.ATTACH_DISPLACES else (CALLER, TAIL)


def _reads(world: World, reader: int) -> bool:
    return world.alive[reader] and world.reading[reader]


def _with(pair: tuple[bool, bool], at: int, value: bool) -> tuple[bool, bool]:
    return (value, pair[1]) if at == 0 else (pair[0], value)


def fault(before: World, label: str, after: World) -> str | None:
    if after.state == ORPHANED and any(_reads(after, reader) for reader in (CALLER, TAIL)):
        return "a job that is read was orphaned"
    if after.state == CANCELLED and label != f"leave {CALLER}":
        return "somebody else than its caller cancelled a plain job"
    return None


def check(bug: Bug | None) -> tuple[int, str | None, tuple[str, ...]]:
    """Worlds seen; the fault and the shortest way to it."""
    ways: dict[World, tuple[str, ...]] = {FIRST: ()}
    after: dict[World, set[World]] = {}
    waiting = deque([FIRST])
    while waiting:
        world = waiting.popleft()
        after[world] = set()
        for label, to in steps(world, bug):
            way = (*ways[world], label)
            if (found := fault(world, label, to)) is not None:
                return len(ways), found, way
            after[world].add(to)
            if to not in ways:
                ways[to] = way
                waiting.append(to)
    return len(ways), *_stuck(ways, after)


def _stuck(
    ways: dict[World, tuple[str, ...]], after: dict[World, set[World]]
) -> tuple[str | None, tuple[str, ...]]:
    """From every world in which both frontends are dead the job can end."""
    ends = {world for world in ways if world.state != LIVE}
    while more := {world for world in ways if world not in ends and after[world] & ends}:
        ends |= more
    ghosts = [world for world in ways if world not in ends and not any(world.alive)]
    if not ghosts:
        return None, ()
    return "a job that nobody can read is never missed", min((ways[g] for g in ghosts), key=len)


def test_no_order_of_steps_orphans_what_is_read_or_keeps_a_ghost() -> None:
    num_worlds, found, way = check(None)
    assert found is None, f"{found}: {way}"
    assert num_worlds > 150, "the model no longer reaches as much"


@pytest.mark.parametrize(
    ("bug", "expected"),
    [
        (Bug.NO_GRACE, "a job that is read was orphaned"),
        (Bug.ATTACH_DISPLACES, "a job that is read was orphaned"),
        (Bug.ATTACH_KEEPS_CLOCK, "a job that is read was orphaned"),
        (Bug.TAIL_CANCELS, "somebody else than its caller cancelled a plain job"),
        (Bug.NOBODY_LOOKS, "a job that nobody can read is never missed"),
    ],
)
def test_a_seeded_bug_of_the_readers_is_found(bug: Bug, expected: str) -> None:
    _, found, way = check(bug)
    assert found == expected
    assert 0 < len(way) <= 12, way

"""Breadth-first search over all worlds: shortest traces, and which worlds cannot come to an end.

A state is one int: each part of a world is numbered when it is first seen, and the numbers are
packed side by side. Parts repeat endlessly, so a hundred thousand worlds need a few thousand parts.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.protocol.protocol import Protocol
from tests.sim.protocol.world import World, first_world

_BITS = 20
_MASK = (1 << _BITS) - 1


class _Parts:
    """Numbers the parts of worlds."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._parts: list[Any] = []

    def number(self, part: Hashable) -> int:
        number = self._numbers.setdefault(part, len(self._parts))
        if number == len(self._parts):
            assert number <= _MASK, "more parts than the packing holds"
            self._parts.append(part)
        return number

    def __getitem__(self, number: int) -> Any:
        return self._parts[number]


class Packing:
    """Worlds to ints and back."""

    def __init__(self) -> None:
        self._jobs, self._workers, self._readers, self._rest = (_Parts() for _ in range(4))

    def pack(self, world: World) -> int:
        job, (first, second), *rest = world
        workers = self._workers
        return (
            self._jobs.number(job)
            | workers.number(first) << _BITS
            | workers.number(second) << 2 * _BITS
            | self._readers.number((world.reader, world.channel)) << 3 * _BITS
            | self._rest.number(tuple(rest[2:])) << 4 * _BITS
        )

    def unpack(self, packed: int) -> World:
        reader, channel = self._readers[packed >> 3 * _BITS & _MASK]
        first = self._workers[packed >> _BITS & _MASK]
        second = self._workers[packed >> 2 * _BITS & _MASK]
        job, rest = self._jobs[packed & _MASK], self._rest[packed >> 4 * _BITS]
        return World(job, (first, second), reader, channel, *rest)


@dataclass(frozen=True, slots=True)
class Result:
    """`fault` is None when everything holds; else a sentence, with the shortest way there."""

    num_states: int
    fault: str | None = None
    trace: tuple[str, ...] = ()
    last: World | None = None

    def __str__(self) -> str:
        if self.fault is None:
            return f"OK, {self.num_states} states"
        steps = "\n  ".join(self.trace)
        return f"{self.fault} ({self.num_states} states)\n  {steps}\n  = {self.last}"


@dataclass(slots=True)
class Search:
    """Every world in the order of its distance from the first, and how it was reached."""

    protocol: Protocol
    packing: Packing = field(default_factory=Packing)
    worlds: list[int] = field(default_factory=list)
    parents: array[int] = field(default_factory=lambda: array("l"))
    labels: list[str] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    helping: tuple[array[int], array[int]] = field(
        default_factory=lambda: (array("l"), array("l"))
    )  # the steps that help, from and to

    def run(self) -> Result:
        self._add(first_world(self.protocol.num_faults), 0, "")
        at = 0
        while at < len(self.worlds):
            world = self.packing.unpack(self.worlds[at])
            for step in self.protocol.steps(world):
                fault = self.protocol.violation(world, step)
                if fault is not None:
                    trace = (*self._trace(at), step.label)
                    return Result(len(self.worlds), fault, trace, step.world)
                to = self._add(step.world, at, step.label)
                if step.helps:
                    self.helping[0].append(at)
                    self.helping[1].append(to)
            at += 1
        return self._liveness()

    def _add(self, world: World, parent: int, label: str) -> int:
        packed = self.packing.pack(world)
        number = self.numbers.setdefault(packed, len(self.worlds))
        if number == len(self.worlds):
            self.worlds.append(packed)
            self.parents.append(parent)
            self.labels.append(label)
        return number

    def _trace(self, at: int) -> tuple[str, ...]:
        labels = []
        while at:
            labels.append(self.labels[at])
            at = self.parents[at]
        return tuple(reversed(labels))

    def _liveness(self) -> Result:
        """From every world the end can be reached without a further fault, cancel or deadline."""
        before: list[list[int]] = [[] for _ in self.worlds]
        for origin, to in zip(*self.helping, strict=True):
            before[to].append(origin)
        unpack, is_over = self.packing.unpack, self.protocol.is_over
        reached = [at for at, packed in enumerate(self.worlds) if is_over(unpack(packed))]
        ends = bytearray(len(self.worlds))
        for at in reached:
            ends[at] = 1
        while reached:
            for origin in before[reached.pop()]:
                if not ends[origin]:
                    ends[origin] = 1
                    reached.append(origin)
        stuck = ends.find(0)
        if stuck < 0:
            return Result(len(self.worlds))
        fault = "from here neither the job nor its reader comes to an end by itself"
        return Result(len(self.worlds), fault, self._trace(stuck), unpack(self.worlds[stuck]))


def check(protocol: Protocol) -> Result:
    return Search(protocol).run()

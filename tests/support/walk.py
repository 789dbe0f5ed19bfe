"""The steps of a walk through the service, how long each took, and each wait in it by its name."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.terminal import Terminal

LONG_S = 2.0  # a wait that a person notices
SHOWN = 70
SHOWN_CPU_S = 0.05
MOST_SILENCES = 3  # the longest ones of a step
_CLOCK = re.compile(r"^\d\d:\d\d:\d\d\.\d+ [A-Z]+ +")


@dataclass
class Step:
    """One thing that somebody does, until it is done. `waits`: what took long in it, and why."""

    name: str
    seconds: float = 0.0
    waits: list[str] = field(default_factory=list)
    cpu_s: float = 0.0  # of what ran for it, where that can be told
    load: float = 0.0  # how many processes wanted a core at its end, in the mean of a minute


class Walk:
    """Collects steps in their order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @contextmanager
    def step(self, name: str, wait: str = "") -> Iterator[Step]:
        """Times the block; what it raises ends the walk. `wait`: why it may take long."""
        step = Step(name)
        began_s, used_s = time.monotonic(), _used_s()
        yield step
        step.seconds, step.cpu_s = time.monotonic() - began_s, _used_s() - used_s
        if wait and step.seconds > LONG_S:
            step.waits.append(f"{step.seconds:.1f} s: {wait}")
        self.add(step)

    def add(self, step: Step) -> None:
        """Adds a step that was timed, and says so on stderr."""
        step.load = os.getloadavg()[0]
        self.steps.append(step)
        sys.stderr.write(f"{step.seconds:8.1f} s  {step.name}\n")

    def phases(
        self, step: Step, terminal: Terminal, phases: Sequence[tuple[str, str]], end_s: float
    ) -> None:
        """Divides what a terminal showed by the lines at which each phase begins: `(pattern, what
        is waited for)`. A phase that was not there is left out."""
        times = [(at_s, name) for pattern, name in phases if (at_s := _begin(terminal, pattern))]
        for (begin_s, name), (next_s, _) in zip(times, [*times[1:], (end_s, "")], strict=True):
            if next_s - begin_s > LONG_S:
                step.waits.append(f"{next_s - begin_s:.1f} s: {name}")
        silences = terminal.silences(LONG_S, end_s)
        for silence in sorted(silences, key=lambda one: -one.seconds)[:MOST_SILENCES]:
            shown = _CLOCK.sub("", silence.after)[:SHOWN] or "nothing"
            step.waits.append(f"of these {silence.seconds:.1f} s in silence, behind “{shown}”")

    def table(self) -> str:
        """Returns the steps as a table of Markdown."""
        rows = ["| step | s | CPU s | load | waits longer than 2 s |"]
        rows += ["| --- | ---: | ---: | ---: | --- |"]
        for step in self.steps:
            cpu = f"{step.cpu_s:.1f}" if step.cpu_s > SHOWN_CPU_S else ""
            waits = "; ".join(step.waits)
            rows.append(f"| {step.name} | {step.seconds:.1f} | {cpu} | {step.load:.0f} | {waits} |")
        return "\n".join(rows)


def _used_s() -> float:
    """Processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _begin(terminal: Terminal, pattern: str) -> float | None:
    """Returns when a phase began: at the first line with `pattern`; "" is the start."""
    return 1e-9 if not pattern else terminal.when(pattern)

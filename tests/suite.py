"""`make test`: pytest runs one after the other, in a temporary folder of this run, and one summary.

    python -m tests.suite run [--marks EXPRESSION] [--unrecorded] [--beside ARGUMENTS] ARGUMENTS ...
    python -m tests.suite failed

Both work in the repository's root. Each ARGUMENTS is one word, pytest's arguments for one run. The
run `beside` the others has a low priority: it gets the processor time that they leave, and its
output comes when it has ended. The last of several runs has the machine for itself: it begins when
all others have ended.

The last lines are the counts of all runs and the names of the tests that failed. `failed` runs
those once more; where more than tests went wrong it says so instead, with status 1. What is left in
the temporary folder is named and counts as a failure. An unrecorded run may go beside another one:
`failed` and tools.stats know nothing of it.

Each run has a session of its own. Ctrl-C, SIGTERM and a terminal that closes (SIGHUP) interrupt all
of them; what has not ended some seconds later is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from shared.process import STOP_SIGNALS, dying_with_this_process

FAILED = Path(".pytest_cache/failed-tests")  # a name in each line, of the last `run` here
TROUBLE = Path(".pytest_cache/last-trouble")  # what it failed by, where not by tests alone
LAST_RUN = Path(".pytest_cache/last-run")  # its counts and time, for tools.stats
INTERRUPTED = 2  # pytest's status
NOTHING_TO_RUN = 5  # pytest's status where no test was found
MAY_STAY = (
    "penstock-engine-*",  # of an engine whose worker was ended by SIGKILL; the next removes it
    "vllm-of-tests-*",  # of tests whose process was ended by SIGKILL after an interrupt
    "torchinductor_*",  # torch's headers, compiled once for a user; TORCHINDUCTOR_CACHE_DIR or not
)
MOST_NAMES = 50
LOW_PRIORITY = 10  # it gets a tenth where others want all
END_TIMEOUT_S = 30.0  # for an interrupted run: xdist gives its processes 10


@dataclass
class Outcome:
    """What several pytest runs came to. `status` is the worst of theirs."""

    status: int = 0
    num_runs: int = 0
    num_skipped: int = 0
    seconds: float = 0.0
    tests: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def take_report(self, report: Path) -> None:
        """Adds a report in JUnit's format. A test that fails and whose teardown fails is one."""
        cases: dict[str, bool] = {}
        for case in ET.parse(report).getroot().iter("testcase"):
            test = _name_of(case)
            is_failed = case.find("failure") is not None or case.find("error") is not None
            cases[test] = cases.get(test, False) or is_failed
            self.num_skipped += case.find("skipped") is not None
        self.tests += cases
        self.failed += [test for test, is_failed in cases.items() if is_failed]

    def summary(self) -> str:
        """Returns the counts of tests and their time, in one line."""
        num_passed = len(self.tests) - len(self.failed) - self.num_skipped
        skipped = f", {self.num_skipped} skipped" if self.num_skipped else ""
        return (
            f"{len(self.tests)} tests in {self.num_runs} runs, {self.seconds / 60:.0f} min: "
            f"{num_passed} passed, {len(self.failed)} failed{skipped}"
        )

    def lines(self) -> list[str]:
        """The summary: the names of failed tests are the last lines."""
        lines = [f"left in the temporary folder: {name}" for name in self.left]
        lines.append(self.summary())
        if self.status and not self.failed and not self.left:
            lines.append(f"pytest ended with status {self.status}: see above")
        lines += [f"failed: {test}" for test in self.failed[:MOST_NAMES]]
        if len(self.failed) > MOST_NAMES:
            lines.append(f"... and {len(self.failed) - MOST_NAMES} more: {FAILED}")
        return lines


def _name_of(case: ET.Element) -> str:
    """Returns the name by which pytest runs a test: its file, its classes and its own."""
    path, name = case.get("file"), case.get("name", "")
    names = case.get("classname", "")  # of the module, then of classes, with dots
    if not path:  # of a file that could not be read
        return name or names
    module = path.removesuffix(".py").replace("/", ".")
    classes = names.removeprefix(f"{module}.").split(".") if names.startswith(f"{module}.") else []
    return "::".join((path, *classes, name))


def run(argument_lists: Sequence[Sequence[str]], beside: Sequence[str] | None = None) -> Outcome:
    """Runs pytest once for each list of arguments. An interrupted run is the last one.

    `beside` are the arguments of one more run, at a low priority, which begins with the first. The
    last of several runs begins when it has ended.
    """
    outcome, begin_s = Outcome(), time.monotonic()
    # Short: the paths of Unix sockets below it have about a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="pst-"))
    running: list[Pytest] = []
    try:
        _raise_on_signals()
        if beside is not None:
            running.append(Pytest(folder, "b", beside, is_low=True))
        for number, arguments in enumerate(argument_lists):
            running.insert(0, Pytest(folder, str(number), arguments))
            is_last_next = number + 2 >= len(argument_lists)
            for ending in tuple(running if is_last_next else running[:1]):
                ending.wait()
                running.remove(ending)
                ending.take_results(outcome)
    except KeyboardInterrupt:
        for interrupted in running:
            interrupted.interrupt()
        for interrupted in running:
            interrupted.end()
        for interrupted in running:
            interrupted.take_results(outcome)
        outcome.status = max(outcome.status, INTERRUPTED)
    finally:
        outcome.left = sorted(path.name for path in folder.iterdir() if not _may_stay(path))
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.left:
        outcome.status = max(outcome.status, 1)
    outcome.seconds = time.monotonic() - begin_s
    return outcome


def _may_stay(path: Path) -> bool:
    """Returns whether a test may leave this in the temporary folder."""
    return any(path.match(pattern) for pattern in MAY_STAY)


def _raise_on_signals() -> None:
    """Raises KeyboardInterrupt at the first of STOP_SIGNALS, and ignores later ones."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in STOP_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as under nohup
            signal.signal(each, interrupt)


def _interruptible_with_this_process() -> Callable[[], None]:
    """Returns a `preexec_fn`: the child is interrupted when this process ends.

    Also where this process ignores interrupts, as in the background of a script.
    """
    dies = dying_with_this_process(signal.SIGINT)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if dies is not None:
            dies()

    return prepare


class Pytest:
    """A run of pytest, with its own folder in the suite's folder for what tests write.

    With `is_low` it has a low priority, and its output is printed when it has ended.
    """

    def __init__(
        self, folder: Path, name: str, arguments: Sequence[str], *, is_low: bool = False
    ) -> None:
        self.report = folder / f"report-{name}.xml"
        self._written = folder / f"t{name}"
        self._output: IO[str] | None = None
        if is_low:
            self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        options = [f"--basetemp={self._written}", f"--junitxml={self.report}"]
        options += ["-o", "junit_family=xunit1"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *options, *arguments],
            # torch makes a folder for compiled graphs when a part of it is imported. Without
            # bytecode each of many processes would compile what it imports.
            env={
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "",
                "TMPDIR": str(folder),
                "TORCHINDUCTOR_CACHE_DIR": str(self._written / "torchinductor"),
            },
            stdout=self._output,
            # Linux shares the processor among sessions before it looks at priorities within one.
            start_new_session=True,
            preexec_fn=_interruptible_with_this_process(),
        )
        if is_low:
            _lower_priority(self._process.pid)

    def wait(self) -> None:
        """Returns when it has ended."""
        self._process.wait()

    def interrupt(self) -> None:
        """Interrupts pytest, which then ends its processes and reports."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Waits END_TIMEOUT_S, then kills what is left of its session."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def take_results(self, outcome: Outcome) -> None:
        """Adds what it came to, after its end. Prints its output where it has a low priority."""
        outcome.num_runs += 1
        outcome.status = max(outcome.status, abs(self._process.returncode))
        if self.report.exists():
            outcome.take_report(self.report)
            self.report.unlink()
        shutil.rmtree(self._written, ignore_errors=True)  # pytest's own, kept for failed tests
        if self._output is not None:
            with self._output as output:
                output.seek(0)
                print(output.read(), end="", flush=True)


def _lower_priority(pid: int) -> None:
    """Gives a process, all that it starts, and its session a low priority."""
    os.setpriority(os.PRIO_PROCESS, pid, LOW_PRIORITY)
    with contextlib.suppress(OSError):  # a kernel without autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(LOW_PRIORITY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    actions = parser.add_subparsers(dest="action", required=True)
    all_tests = actions.add_parser("run")
    all_tests.add_argument("--marks", default="")
    all_tests.add_argument("--unrecorded", action="store_true")
    all_tests.add_argument("--beside")
    all_tests.add_argument("arguments", nargs="+")
    actions.add_parser("failed")
    parsed = parser.parse_args()
    if parsed.action == "failed":
        return _run_failed()
    is_recorded = not parsed.unrecorded
    if is_recorded:  # until it ends, so that the run before it is not taken for it
        FAILED.parent.mkdir(exist_ok=True)
        FAILED.write_text("")
        TROUBLE.write_text("the run did not end\n")
        LAST_RUN.unlink(missing_ok=True)
    marks = ["-m", parsed.marks] if parsed.marks else []
    outcome = run(
        [[*marks, *shlex.split(arguments)] for arguments in parsed.arguments],
        [*marks, *shlex.split(parsed.beside)] if parsed.beside else None,
    )
    if is_recorded:
        _record(outcome)
    print("", *outcome.lines(), sep="\n", flush=True)
    return outcome.status


def _record(outcome: Outcome) -> None:
    """Writes what `failed` and tools.stats read."""
    # Where more went wrong than tests, running some of them again would show nothing.
    is_by_tests = outcome.status in (0, 1) and not outcome.left
    FAILED.write_text("".join(f"{name}\n" for name in outcome.failed if is_by_tests))
    TROUBLE.write_text("" if is_by_tests else "".join(f"{line}\n" for line in outcome.lines()))
    LAST_RUN.write_text(f"{outcome.summary()}\n")


def _run_failed() -> int:
    """The status is 0 where every test was run and passed now. The names say which had failed."""
    names = FAILED.read_text().splitlines() if FAILED.exists() else []
    if trouble := TROUBLE.read_text() if TROUBLE.exists() else "":
        print("the last `make test` failed by more than tests, which need not pass when run again:")
        print(trouble, end="")
        return 1
    if not names:
        print("no test failed in the last `make test`: there is nothing to run again")
        return NOTHING_TO_RUN
    outcome = run([[f"@{FAILED}"]])
    print("", *outcome.lines(), sep="\n")
    for name in names:
        if name in outcome.tests:
            again = "failed" if name in outcome.failed else "passed"
            print(f"run twice: {name} (failed, then {again})")
        else:
            print(f"not run again: {name} (failed)")
            outcome.status = max(outcome.status, 1)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())

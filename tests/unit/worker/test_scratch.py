"""An engine's temporary folder goes with its processes, also where its worker was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker.runtime.scratch import LOCK, OLD_S, PREFIX, Scratch, sweep

WORKER = """
import subprocess, sys, time
from worker.runtime.scratch import Scratch
scratch = Scratch()
(scratch.path / "graph").mkdir()
engine = None
if sys.argv[1] == "with an engine":
    code = "import sys; sys.stdin.read()"
    engine = subprocess.Popen([sys.executable, "-c", code], pass_fds=[scratch.fd])
print(scratch.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # the one that was found before
    return tmp_path


@pytest.fixture
def start() -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], Path]]]:
    """Starts a worker with a folder. The pipe to its standard input is its engine's too."""
    started = []

    def start(kind: str) -> tuple[subprocess.Popen[bytes], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().decode().strip())

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[[str], tuple[subprocess.Popen[bytes], Path]]


def test_a_folder_stays_while_its_worker_lives_and_goes_when_it_was_killed(start: Start) -> None:
    killed, left = start("alone")
    _, alive = start("alone")
    own = Scratch()
    assert sweep() == []
    killed.kill()
    killed.wait()
    assert sweep() == [left]
    assert not left.exists()
    assert alive.exists()
    own.close()
    assert not own.path.exists()


def test_it_stays_while_the_engine_of_a_killed_worker_lives(start: Start) -> None:
    killed, left = start("with an engine")
    killed.kill()
    killed.wait()
    assert sweep() == []
    assert left.exists()
    killed.communicate()  # closes the pipe; standard output ends with the engine
    assert sweep() == [left]


def test_one_without_a_lock_is_of_an_older_version_when_it_is_old(directory: Path) -> None:
    new, old = directory / f"{PREFIX}new", directory / f"{PREFIX}old"
    for path, age_s in ((new, 0.0), (old, OLD_S + 60)):
        path.mkdir()
        then = path.stat().st_mtime - age_s
        os.utime(path, (then, then))
    assert sweep() == [old]
    assert new.exists()


def test_what_is_not_an_engines_folder_stays(directory: Path) -> None:
    other = directory / "thesis"
    other.mkdir()
    (other / LOCK).touch()
    (directory / f"{PREFIX}link").symlink_to(other)
    assert sweep() == []
    assert other.exists()

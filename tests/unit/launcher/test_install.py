"""pip as the first start runs it: what it says meanwhile, and what an interrupt leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launcher import install as installing
from penstock.launcher.install import drop_half_installed, install

REPOSITORY = Path(__file__).resolve().parents[3]
# In place of pip: unpacks, and goes on when that was said.
UNPACKS = """
import pathlib, sys, time
packages = pathlib.Path(sys.argv[1])
for number in range(2):
    with open(packages / f"module_{number}.py", "w") as module:
        module.truncate(1_000_000_000)  # a hole, which takes no place
    while not (packages / f"said_{number}").exists():
        time.sleep(0.01)
sys.exit(3)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "packages"
    directory.mkdir()
    monkeypatch.setattr(installing.sysconfig, "get_path", lambda name: str(directory))
    monkeypatch.setattr(installing, "TELL_S", 0.05)
    return directory


@pytest.mark.promise(
    "Command: the first start shows what it fetches, how much it has unpacked, and that kernels "
    "are compiled; Ctrl-C in it ends with a sentence, and the next start continues"
)
def test_what_is_unpacked_is_said_while_pip_is_silent(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(sentence: str) -> None:
        (packages / f"said_{len(said)}").touch()
        said.append(sentence)

    monkeypatch.setattr(installing, "say", say)
    monkeypatch.setattr(installing, "PIP", (sys.executable, "-c", UNPACKS))
    assert install([str(packages)]) == 3, "the status is pip's"
    assert said == ["1.0 GB are unpacked", "2.0 GB are unpacked"]


def test_metadata_of_an_interrupted_install_goes(packages: Path) -> None:
    """pip would take the package for installed."""
    for name, file in (("whole-1.dist-info", "RECORD"), ("half-1.dist-info", "METADATA")):
        (packages / name).mkdir()
        (packages / name / file).touch()
    drop_half_installed(packages)
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_ctrl_c_ends_it_with_a_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.launcher import install as i;"
        "i.PIP = (sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)');"
        "sys.exit(i.install([]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        process_group=0,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "penstock: stopped; the next start resumes" in shown

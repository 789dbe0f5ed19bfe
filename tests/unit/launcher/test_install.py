"""pip as the first start runs it: what it says meanwhile, and what an interrupt leaves."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.launcher import install as installing
from penstock.launcher.install import drop_half_installed, install

REPOSITORY = Path(__file__).resolve().parents[3]
# In place of pip: fetches, unpacks, and goes on when the line of that was shown.
UNPACKS = """
import pathlib, sys, time
packages = pathlib.Path(sys.argv[1])
def until(name):
    while not (packages / name).exists():
        time.sleep(0.01)
print("  Downloading https://host/whl/torch-2.13.0-cp311.whl (184.5 MB)", flush=True)
until("fetching torch (184.5 MB)")
print("Installing collected packages: torch", flush=True)
with open(packages / "module.py", "w") as module:
    module.truncate(1_000_000_000)  # a hole, which takes no place
until("1.0 of about 2.0 GB unpacked")
"""
FAILS = "import sys; print(*range(100), sep='\\n'); print('no such package'); sys.exit(3)"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "packages"
    directory.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installing.sysconfig, "get_path", lambda name: str(directory))
    monkeypatch.setattr(installing, "TELL_S", 0.05)
    return directory


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, packages: Path) -> list[str]:
    """What is said; each state that is shown becomes a file's name beside the packages."""
    sentences: list[str] = []

    def say(sentence: str) -> None:
        sentences.append(re.sub(r"\d+ s$", "N s", sentence))
        (packages / sentence.partition(": ")[2].rpartition(",")[0].replace("/", "_")).touch()

    monkeypatch.setattr(installing, "say", say)
    return sentences


@pytest.mark.promise(
    "Command: the first start shows in one line what it fetches and how much it has unpacked, and "
    "that kernels are compiled; pip's output is in a file; Ctrl-C in it ends with a sentence, and "
    "the next start continues"
)
def test_one_line_shows_what_is_fetched_and_how_much_is_unpacked(
    packages: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "LINE_S", 0.0)
    monkeypatch.setattr(installing, "PIP", (sys.executable, "-c", UNPACKS))
    assert install([str(packages)], "PyTorch", 2_000_000_000) == 0
    shown = list(dict.fromkeys(said))
    fetching = "installing PyTorch: fetching torch (184.5 MB), N s"
    assert [line for line in shown if "fetching packages" not in line] == [
        fetching,
        "installing PyTorch: 1.0 of about 2.0 GB unpacked, N s",
        "installed PyTorch, 1.0 GB in N s",
    ]
    log = installing.LOG.read_text()
    assert "Downloading https://host/whl/torch" in log


def test_a_pipe_gets_a_line_at_the_end_of_a_quick_installation(
    packages: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "PIP", (sys.executable, "-c", "import time; time.sleep(0.3)"))
    assert install([], "PyTorch") == 0
    assert said == ["installed PyTorch, 0.0 GB in N s"]


def test_where_pip_fails_its_last_lines_and_the_file_with_all_of_them_are_shown(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installing, "PIP", (sys.executable, "-c", FAILS))
    assert install([], "PyTorch") == 3, "the status is pip's"
    *shown, sentence = capsys.readouterr().err.splitlines()
    assert shown == [*(f"  {number}" for number in range(81, 100)), "  no such package"]
    assert sentence == (
        "penstock: installing PyTorch failed: pip ended with status 3. All it printed: "
        ".penstock/install.log"
    )
    assert len(installing.LOG.read_text().splitlines()) == 101


def test_a_terminal_has_one_line_that_changes(tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.launcher import install as i; i.TELL_S = 0.05;"
        "i.PIP = (sys.executable, '-c', 'import time; time.sleep(1)');"
        "sys.exit(i.install([], 'PyTorch'))"
    )
    master, terminal = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=tmp_path, env=env, stderr=terminal).returncode == 0
    os.close(terminal)
    output = os.read(master, 65536).decode()
    os.close(master)
    assert output.count("\r\x1b[Kpenstock: installing PyTorch: fetching packages, ") > 1
    assert output.count("\n") == 1
    assert output.rpartition("\x1b[K")[2].startswith("penstock: installed PyTorch, ")


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
        "sys.exit(i.install([], 'PyTorch'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        process_group=0,
    ) as process:
        while not (log := tmp_path / installing.LOG).exists() or not log.read_text():
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "penstock: stopped; the next start resumes" in shown

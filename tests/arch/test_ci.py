"""`.ci/run` ends what it started in the background when it ends early."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
# As make and what it starts: the install is a process below make's, which dies without it.
MAKE = """#!/bin/sh
case $1 in
images-check) sleep 60 & echo $! >"$PIDS/build"; wait ;;
vllm) sh -c 'trap "" HUP; echo $$ >"$PIDS/install"; sleep 60; :' & echo $$ >"$PIDS/make"; wait ;;
lint) while [ ! -s "$PIDS/install" ] || [ ! -s "$PIDS/build" ]; do sleep 0.05; done; exit 3 ;;
esac
"""


def test_a_lint_that_fails_ends_the_install_and_all_that_it_started(tmp_path: Path) -> None:
    programs, pids = tmp_path / "bin", tmp_path / "pids"
    for folder in (programs, pids, tmp_path / ".ci"):
        folder.mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    allowed = {"unshare": "#!/bin/sh\n", "apt-get": "#!/bin/sh\n"}
    for name, text in {"make": MAKE, **allowed}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    ended = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PIDS": str(pids)},
        stdout=subprocess.DEVNULL,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 3
    left = [int(path.read_text()) for path in pids.iterdir()]
    assert len(left) == 3
    assert _still_run(left) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are root's to make")
def test_mounts_and_processes_of_images_check_end_with_make_that_is_killed(tmp_path: Path) -> None:
    text = SCRIPT.parents[1].joinpath("Makefile").read_text()
    (prefix,) = re.findall(r"^ITS_OWN := (.*)$", text, re.M)
    assert re.search(r"^\t@\$\(ITS_OWN\) \$\(BIN\)/python -m tests.suite", text, re.M)
    inside = f"mount -t tmpfs of-test {tmp_path}/mounted; setsid sleep 61 & sleep 60"
    (tmp_path / "mounted").mkdir()
    (tmp_path / "Makefile").write_text(f"all:\n\t@{prefix} sh -c '{inside}'\n")
    make = subprocess.Popen(["make", "-C", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        found: list[int] = []
        deadline = time.monotonic() + 20
        while len(found) < 4 and time.monotonic() < deadline:  # unshare, sh and two of sleep
            time.sleep(0.05)
            found = _below(make.pid)
        assert "of-test" in Path(f"/proc/{found[-1]}/mounts").read_text()
        assert "of-test" not in Path("/proc/mounts").read_text()
    finally:
        make.kill()
        make.wait(20)
    assert len(found) >= 4
    assert _still_run(found) == []


def _below(pid: int) -> list[int]:
    """Returns the processes that descend from one, level by level."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    children = [int(child) for child in listed]
    return [*children, *(each for child in children for each in _below(child))]


def _still_run(pids: list[int]) -> list[int]:
    """Returns those that have not ended after ten seconds."""
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

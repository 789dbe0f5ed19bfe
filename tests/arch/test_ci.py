"""`.ci/run` ends what it started in the background when it ends early."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
# As make and what it starts: the install is a process below make's, which dies without it.
MAKE = """#!/bin/sh
case $1 in
vllm) sh -c 'trap "" HUP; echo $$ >"$PIDS/install"; sleep 60; :' & echo $$ >"$PIDS/make"; wait ;;
lint) while [ ! -s "$PIDS/install" ]; do sleep 0.05; done; exit 3 ;;
esac
"""


def test_a_lint_that_fails_ends_the_install_and_all_that_it_started(tmp_path: Path) -> None:
    programs, pids = tmp_path / "bin", tmp_path / "pids"
    for folder in (programs, pids, tmp_path / ".ci"):
        folder.mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    for name, text in {"make": MAKE, "apt-get": "#!/bin/sh\n"}.items():
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
    assert len(left) == 2
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in left if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

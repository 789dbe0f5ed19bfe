"""The first minutes of somebody who holds the README alone, from `penstock up` on: in a terminal, a
browser, the command line and redis-cli. `python -m tests.e2e.first_minutes` installs first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.launched import REPOSITORY, free_port
from tests.support.terminal import Terminal
from tests.support.walk import Walk
from tests.support.walked_service import READY, WalkedService, make_slow_model, walk_answers

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.mark.promise(
    "Command: a reader of the README alone gets from `penstock up` over a reload and a killed "
    "worker in mid-answer to the job in the dashboard, in the command line and in redis-cli, and "
    "cancels another"
)
def test_an_answer_is_found_everywhere_after_a_reload_and_a_killed_worker() -> None:
    # Not in pytest's folder: the path of the server's socket would be too long for the README's.
    with tempfile.TemporaryDirectory(prefix="first-") as name:
        directory = Path(name)
        words = [sys.executable, "-m", "penstock", "up", str(make_slow_model(directory / "slow"))]
        words += ["--load-format", "dummy", "--port", str(free_port())]
        env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

        def run(command: object) -> str:
            ended = subprocess.run(
                command,  # type: ignore[call-overload]
                cwd=directory,
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
            return str(ended.stdout)

        walk = Walk()
        with Terminal(words, directory, env) as terminal:
            terminal.until(READY, 120)
            for page in ("/", "/dashboard", "/docs"):
                assert re.search(rf"  \w+ +http://\S+:\d+{page}\n", terminal.output)
            walk_answers(walk, WalkedService(terminal, directory, run), REPOSITORY / "README.md")
            terminal.press_ctrl_c()
            assert terminal.wait(60) == 0, "Ctrl-C is the way to stop"
        assert "Traceback" not in terminal.output
        assert len(walk.steps) == 10, walk.table()

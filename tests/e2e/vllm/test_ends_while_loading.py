"""A launcher that ends while its vLLM is loading leaves no process, whichever way it ends."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from penstock.launcher.main import KILL_AFTER_S
from tests.support.launched import Launched, is_alive
from tests.support.polling import wait_until
from tests.support.vllm_worker import READY_TIMEOUT_S, vllm_settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

STOP_TIMEOUT_S = 2.0
END_S = STOP_TIMEOUT_S + KILL_AFTER_S + 10.0  # and what a busy machine takes for it


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_no_process_of_vllm_outlives_the_launcher(tmp_path: Path, signum: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(prefix="v") as temporary:  # short, for paths of sockets
        check_end(tmp_path, signum, Path(temporary))


def check_end(directory: Path, signum: signal.Signals, temporary: Path) -> None:
    env = vllm_settings(TENSOR_PARALLEL_SIZE="2", STOP_TIMEOUT_S=str(STOP_TIMEOUT_S))
    env["TMPDIR"] = str(temporary)
    penstock = Launched(directory, env)
    penstock.spawn()
    try:
        # vLLM's own children, of which each loads its half of the model.
        wait_until(
            lambda: len(of(penstock, b"multiprocessing.spawn")) == 2, "two ranks", READY_TIMEOUT_S
        )
        assert "Penstock is ready" not in penstock.output
        started = penstock.descendants()
        assert len(of(penstock, b"worker.runtime")) == 1
        os.kill(penstock.pid, signum)
        wait_until(lambda: not any(map(is_alive, started)), "their ends", END_S)
        assert penstock.wait(END_S) == (0 if signum is signal.SIGTERM else -signum)
        assert "Traceback" not in penstock.output
        assert list(temporary.iterdir()) == []
    finally:
        penstock.kill()


def of(penstock: Launched, word: bytes) -> list[int]:
    """Returns its descendants whose command line has `word`."""
    found = []
    for pid in penstock.descendants():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if word in command:
            found.append(pid)
    return found

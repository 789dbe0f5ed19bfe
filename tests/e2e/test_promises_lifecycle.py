"""Starting and stopping at any moment leaves no process behind and hangs nowhere."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.process import dying_with_this_process
from tests.support.launched import REPOSITORY, Launched, descendants_of, free_port, is_alive


@pytest.mark.promise(
    "Streaming: stopped at any moment of its start, it does not hang and leaves no process"
)
def test_a_stop_at_any_moment_of_the_start_leaves_no_process(tmp_path: Path) -> None:
    rng = random.Random(3)
    seen: set[int] = set()
    for number in range(6):
        directory = tmp_path / str(number)
        directory.mkdir()
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PENSTOCK_RUNNER": "echo"}
        env |= {"PENSTOCK_PORT": str(free_port())}
        env.pop("PENSTOCK_REDIS_URL", None)
        launcher = subprocess.Popen(
            [sys.executable, "-m", "penstock.launcher"],
            cwd=directory,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=dying_with_this_process(),
        )
        stop_s = time.monotonic() + rng.uniform(0.05, 1.4)
        # A moment is what is to be hit here, not a state; in the first round there is one, so that
        # something was started on a busy machine too.
        while time.monotonic() < stop_s or (number == 0 and not seen):
            assert launcher.poll() is None
            seen.update(descendants_of(launcher.pid))
            time.sleep(0.01)
        launcher.send_signal(rng.choice([signal.SIGINT, signal.SIGTERM]))
        try:
            launcher.wait(60)
        finally:
            launcher.kill()
            launcher.wait()
    deadline_s = time.monotonic() + 60
    while any(map(is_alive, seen)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert [Path(f"/proc/{pid}/cmdline").read_text() for pid in seen if is_alive(pid)] == []


@pytest.mark.promise("HTTP: no wait delays the shutdown")
def test_an_idle_service_ends_at_once(tmp_path: Path) -> None:
    """Grace times are for streams that run: without one nobody waits."""
    env = {"RUNNER": "echo", "STOP_TIMEOUT_S": "3600"}
    penstock = Launched(tmp_path, env).start()
    assert penstock.stop(signal.SIGTERM) == 0  # within the time that `stop` waits
    assert "Traceback" not in penstock.output


def test_an_early_ctrl_c_is_remembered_and_a_second_one_raises() -> None:
    """An interrupt that is raised inside a callback of an import or a fork is lost."""
    code = (
        "import os, signal\n"
        "from shared.process import EarlySignals\n"
        "early = EarlySignals()\n"
        "early.catch()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert early.received == [signal.SIGINT]\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except KeyboardInterrupt:\n"
        "    early.let_go()\n"
        "    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "    print('raised')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=30
    )
    assert (ended.stdout, ended.stderr) == ("raised\n", "")

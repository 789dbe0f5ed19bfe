"""A child process ends with its parent, also where that is killed, and never outlives it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's prctl")

PARENT = """
import subprocess, sys, time
from shared.process import dying_with_this_process
child = subprocess.Popen(
    [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"],
    preexec_fn=dying_with_this_process(),
)
time.sleep(600)
"""
ORPHAN = """
import signal
from shared.process import die_with_parent
die_with_parent(1 << 30, signal.SIGKILL)
print("still there")
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    # The pipe's last writer is the child: its end is the end of the pipe.
    ready, _, _ = select.select([parent.stdout], [], [], 30)
    assert ready
    assert os.read(parent.stdout.fileno(), 1) == b""
    parent.stdout.close()


def test_a_child_whose_parent_has_ended_before_it_could_ask_ends_too() -> None:
    orphan = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, check=False)
    assert (orphan.returncode, orphan.stdout) == (0, b"")

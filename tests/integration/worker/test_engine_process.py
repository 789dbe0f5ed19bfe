"""The engine's own process, without a service around it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from shared.logs import LogFormat, LogLevel
from worker.runtime.messages import Configure, Shutdown, encode_frame
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[3]


def test_a_process_stopped_before_it_begins_ends_without_a_message() -> None:
    settings = WorkerSettings(redis_url="fake://", runner="echo")
    configure = Configure(settings.engine_options(ROOT), LogLevel.INFO, LogFormat.TEXT)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(configure) + encode_frame(Shutdown()))
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "worker.runtime",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            cwd=ROOT,
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (0, "")

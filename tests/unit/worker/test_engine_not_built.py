"""An engine that cannot be built says whether other settings would help, or another try."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worker.model.errors import CheckpointError
from worker.runtime import process
from worker.runtime.messages import LoadFailed
from worker.settings import WorkerSettings


class Link:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


LACKING = OSError(errno.EMFILE, "Too many open files", "libfoo.so")
UNREADABLE = CheckpointError("model.safetensors cannot be read")


@pytest.mark.promise(
    "vLLM: a start that a passing fault of the host stops is tried again, and the worker then "
    "serves (in `make chaos`)"
)
@pytest.mark.parametrize(
    ("error", "by_settings"),
    [
        (LACKING, False),
        (caused(CheckpointError("config.json cannot be read"), OSError(errno.EIO, "EIO")), False),
        (caused(ValueError("no file"), OSError(errno.ESTALE, "Stale file handle")), False),
        (UNREADABLE, True),
        (caused(CheckpointError("no config.json"), FileNotFoundError(errno.ENOENT, "no")), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (ValueError("VLLM_ARGS"), True),
    ],
    ids=str,
)
def test_a_fault_of_the_host_that_may_pass_is_not_the_settings(
    monkeypatch: pytest.MonkeyPatch, error: Exception, by_settings: bool
) -> None:
    def build(*_: object) -> Any:
        raise error

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(process, "_build", build)
    options = WorkerSettings(redis_url="fake://", runner="echo").engine_options(Path())
    link: Any = Link()
    logs: Any = None  # used where a rank ends
    assert process._serve(options, link, logs) == process.EXIT_NOT_BUILT
    assert link.sent == [LoadFailed(str(error), by_settings=by_settings)]


@pytest.mark.parametrize(
    "start",
    [
        "process._serve(options, None, None)",
        "from worker.llm import LLM; LLM('')",
    ],
)
def test_openmps_threads_sleep_while_they_wait(start: str) -> None:
    code = f"""
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            os._exit(0)

sys.meta_path.insert(0, Finder())
import worker.runtime.process as process
from worker.engine_options import EngineOptions
options = EngineOptions(checkpoint="/nowhere")
{start}
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "PASSIVE\n", done.stderr

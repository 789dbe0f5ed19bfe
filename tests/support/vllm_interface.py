"""Whether a release of vLLM has what worker.engines.vllm relies upon."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.support.vllm_environment import vllm_python
from worker.engine_options import EngineOptions
from worker.runtime.interpreter import environment_of

_PROGRAM = Path(__file__).parents[1] / "contract/worker/engines/vllm/interface_checks.py"


class Found(NamedTuple):
    """Sentences on what is missing: now, and without one method."""

    version: str
    now: list[str]
    without: list[str]


def check_interface(source: Path | None = None) -> Found:
    """Imports vLLM in the interpreter that has it, or the release whose package is in the directory
    `source`, with what else is there. Raises AssertionError where an import fails."""
    python = vllm_python()
    assert python is not None
    environment = dict(environment_of(EngineOptions(checkpoint="", engine="vllm")))
    if source is not None:
        environment["PYTHONPATH"] = f"{source}{os.pathsep}{environment['PYTHONPATH']}"
    read, write = os.pipe()
    with os.fdopen(read, "rb") as results:
        process = subprocess.Popen(
            [python, str(_PROGRAM), str(write)],
            env=environment,
            pass_fds=(write,),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write)
        _, errors = process.communicate()
        data = results.read()
    assert process.returncode == 0, f"an import of worker.engines.vllm's fails:\n{errors[-2000:]}"
    return Found(*json.loads(data))

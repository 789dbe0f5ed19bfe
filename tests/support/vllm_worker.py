"""Settings of workers whose output is compared: one with vLLM, one with the engine of this project.

In float32 both compute the same tokens. The blocks are as long, so that they share as much of a
prompt; vLLM compiles nothing, so that it starts in seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.throttle import FAULTS
from tests.support.vllm_environment import vllm_python

READY_TIMEOUT_S = 300.0  # a busy machine reads gigabytes of libraries first
BLOCK_SIZE = 32

ALIKE = {
    "DTYPE": "float32",
    "DEVICE": "cpu",
    "BLOCK_SIZE": str(BLOCK_SIZE),
    "MAX_NUM_SEQS": "8",
    "MAX_MODEL_LEN": "2048",
    "NUM_KV_BLOCKS": "512",
}


def vllm_settings(**more: str) -> dict[str, str]:
    """Returns the settings of a worker with vLLM. AssertionError where no test can have one."""
    python = vllm_python()
    assert python is not None, "`make vllm` makes the interpreter that these tests need"
    engine = {"ENGINE": "vllm", "ENGINE_PYTHON": python, "VLLM_ARGS": '{"enforce_eager": true}'}
    return {**ALIKE, **engine, "LOAD_TIMEOUT_S": str(int(READY_TIMEOUT_S)), **more}


def own_settings(**more: str) -> dict[str, str]:
    """Returns the settings of a worker with the engine of this project."""
    return {**ALIKE, "ENGINE": "penstock", **more}


def with_faults(directory: Path) -> str:
    """Returns an interpreter with vLLM, for ENGINE_PYTHON, that takes tests/support/faults along.

    The engine process has a module path of its own, to which this interpreter adds.
    """
    python = vllm_python()
    assert python is not None, "`make vllm` makes the interpreter that these tests need"
    path = directory / "python-with-faults"
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH="{FAULTS}{os.pathsep}$PYTHONPATH" exec "{python}" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)

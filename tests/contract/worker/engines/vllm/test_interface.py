"""This release of vLLM has what worker.engines.vllm relies upon: run it when the pin changes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.vllm_environment import vllm_python
from worker.engine_options import EngineOptions
from worker.runtime.interpreter import environment_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def found() -> tuple[list[str], list[str]]:
    python = vllm_python()
    assert python is not None
    read, write = os.pipe()
    with os.fdopen(read, "rb") as results:
        program = Path(__file__).with_name("interface_checks.py")
        process = subprocess.Popen(
            [python, str(program), str(write)],
            env=environment_of(EngineOptions(checkpoint="", engine="vllm")),
            pass_fds=(write,),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write)
        data = results.read()
    _, errors = process.communicate()
    assert process.returncode == 0, f"an import of worker.engines.vllm's fails:\n{errors[-2000:]}"
    now, without = json.loads(data)
    return now, without


@pytest.mark.promise(
    "vLLM: a release of vLLM without a part that the engine uses fails with the name of the part"
)
def test_everything_that_is_relied_upon_is_there(found: tuple[list[str], list[str]]) -> None:
    assert found[0] == []


def test_what_is_not_there_is_named(found: tuple[list[str], list[str]]) -> None:
    assert "LLMEngine has no 'has_unfinished_requests'" in found[1]

"""Imports vLLM once, six seconds of a processor, and forks for each program that needs it.

Runs in vLLM's interpreter. Each line of stdin is JSON: the arguments of a Python program, its
variables, and the files for its output. Each line of stdout is the exit status of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import Any


def run_program(arguments: list[str], variables: dict[str, str], stdout: str, stderr: str) -> int:
    """Runs in this process, a fork, as an interpreter does. Returns the exit status."""
    for descriptor, path in ((0, os.devnull), (1, stdout), (2, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # as the variables have it
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def forked(request: dict[str, Any]) -> int:
    """Returns the exit status of a program, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = run_program(**request)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    import worker.engines.vllm.build

    assert all((vllm, LLMEngine, worker.engines.vllm.build))
    for line in sys.stdin:
        print(forked(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()

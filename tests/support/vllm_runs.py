"""Requests through ENGINE=vllm in the interpreter that has vLLM, from a test in this one."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from shared.messages import (
    ErrorCode,
    FinishReason,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
)
from shared.process import dying_with_this_process
from tests.support.vllm_environment import vllm_python
from worker.engine_options import EngineOptions
from worker.runtime.interpreter import environment_of

TIMEOUT_S = 540.0  # bounds a hang alone: a busy machine takes minutes to load the libraries
_DRIVER = Path(__file__).parents[1] / "contract/worker/engines/vllm/engine_driver.py"


class VllmRequest(msgspec.Struct, frozen=True):
    """A request for the driver. `resumed` are its outputs of an earlier attempt."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    resumed: tuple[int, ...] = ()
    tenant: str = "default"
    job_id: str = ""
    priority: int = 0
    adapter: str = ""
    step: int = 0  # of its run, before which it is added
    cancelled: int = -1  # the step before which it is cancelled; -1: none


class Answer(msgspec.Struct):
    """What one request was answered."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[PromptLogprob]
    finish_reason: FinishReason | None
    error: ErrorCode | None
    message: str
    num_cached_tokens: int
    first_step: int | None  # with an output
    last_step: int | None


class Run(msgspec.Struct):
    """What requests that ran together were answered, by id, and figures of the engine."""

    answers: dict[str, Answer]
    preemptions: int  # since the start, the others of this run
    prompt_tokens: int
    generated_tokens: int


class Printed(NamedTuple):
    """What a program wrote."""

    stdout: str
    stderr: str


@dataclass
class VllmWork:
    """Runs for one start of vLLM, one after the other."""

    options: EngineOptions
    is_late: bool = False  # each step gives what the one before it computed
    runs: list[list[VllmRequest]] = field(default_factory=list)

    def add(self, requests: Sequence[VllmRequest]) -> int:
        """Returns the place of the run among the results."""
        self.runs.append(list(requests))
        return len(self.runs) - 1

    def results(self, folder: Path, env: dict[str, str] | None = None) -> list[Run]:
        """Runs all. Raises AssertionError with what the process wrote when it fails."""
        work, results = folder / "work", folder / "results"
        options: dict[str, Any] = msgspec.to_builtins(self.options)
        work.write_bytes(
            msgspec.msgpack.encode({"options": options, "is_late": self.is_late, "runs": self.runs})
        )
        run_in_vllm([str(_DRIVER), str(work), str(results)], self.options, env)
        return msgspec.msgpack.decode(results.read_bytes(), type=list[Run])


def run_in_vllm(
    arguments: Sequence[str],
    options: EngineOptions,
    env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Printed:
    """Returns what a program prints that runs as an engine process would.

    Raises AssertionError with what it wrote when it fails.
    """
    inherited = environment_of(options)
    assert inherited is not None, "PENSTOCK_ENGINE=vllm has an environment of its own"
    variables = inherited | {"OMP_NUM_THREADS": "1"} | (env or {})
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        request = {"arguments": list(arguments), "variables": variables}
        request |= {"stdout": str(stdout), "stderr": str(stderr)}
        status = _Forks.of_this_process(variables).run(request, timeout_s)
        printed = Printed(stdout.read_text(errors="replace"), stderr.read_text(errors="replace"))
        assert status == 0, printed.stderr[-8000:]
        return printed


class _Forks:
    """A process of vLLM's interpreter that has imported vLLM (tests/support/vllm_forks.py)."""

    _only: ClassVar[_Forks | None] = None

    def __init__(self, variables: dict[str, str]) -> None:
        python = vllm_python()
        assert python is not None, "the marker vllm is for tests that are skipped without it"
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("vllm_forks.py"))],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=dying_with_this_process(),
        )

    @classmethod
    def of_this_process(cls, variables: dict[str, str]) -> _Forks:
        """Returns the one of this process of pytest, which is started at its first use."""
        if cls._only is None or cls._only._process.poll() is not None:
            cls._only = cls(variables)
        return cls._only

    def run(self, request: dict[str, Any], timeout_s: float) -> int:
        """Returns the exit status of a program. Raises TimeoutError where it does not end."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        if not select.select([stdout], [], [], timeout_s)[0]:
            self._process.kill()
            raise TimeoutError(f"no end in {timeout_s} s: {request['arguments']}")
        answer = stdout.readline()
        assert answer, "vLLM cannot be imported"
        return int(answer)

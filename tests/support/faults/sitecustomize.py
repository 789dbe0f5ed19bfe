"""Faults that a process cannot be given from outside; on PYTHONPATH of the processes under test.

Python imports this by itself at start. In an engine process it sets traps, which a prompt springs
by its first token (echo runner; with CHAOS_TRAP the poison on any engine), a throttle, which
tests/support/throttle.py sets, and a device that can fail (with a model). Elsewhere it does nothing
unless CHAOS_CLOCK_OFFSET_S, CHAOS_SCHEMA, JOB_HISTORY or DOCUMENT_CHECKED is set.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from typing import Any

POISON_TOKEN = 350  # kills the engine before the job's first token of this attempt
CRASHER_TOKEN = 351  # kills the engine after three tokens of this attempt
CRASHER_TOKENS = 3
ASSERT_TOKEN = 353  # makes the device assert before the job's first token of this attempt
DEVICE = (
    "CHAOS_DEVICE"  # names a file; while it is there it has the steps that the device still does
)
PLACE = "CHAOS_PLACE"  # where a device fails: launch, sampler, collect or capture
MEMORY = "CHAOS_STEP_TOKENS"  # a step of more tokens (sampler: rows) than these is out of memory
TRAP = "CHAOS_TRAP"  # set: a poison prompt kills any engine
AMX_CALLS = "AMX_CALLS"  # names a file, to which who asks for AMX adds its id and its threads
SCRIPT = "AGENT_SCRIPT"  # names the file of a tests.support.scripted_model.Script
THROTTLE = "ENGINE_THROTTLE"  # names a file; while it is there it says "<tokens> <seconds>"
PASSED_ON = "PYTHON_FAULTS"  # of a name that is passed on
NAMES = frozenset((AMX_CALLS, SCRIPT, THROTTLE, "PENSTOCK_RUNNER", "JOB_HISTORY"))


def _set_traps() -> None:
    from worker.engine.errors import DeviceLost
    from worker.engines.echo import EchoModelRunner

    launch = EchoModelRunner.launch
    num_sampled: Counter[int] = Counter()

    def trapped(self: EchoModelRunner, batch: Any) -> Any:
        for sequence in batch.sequences:
            trap = sequence.prompt_token_ids[0]
            if trap == POISON_TOKEN:
                os.kill(os.getpid(), signal.SIGKILL)
            if trap == ASSERT_TOKEN:
                raise DeviceLost("CUDA error: device-side assert triggered")
            if trap == CRASHER_TOKEN and sequence.samples:
                num_sampled[sequence.seq_id] += 1
                if num_sampled[sequence.seq_id] > CRASHER_TOKENS:
                    os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, batch)

    EchoModelRunner.launch = trapped  # type: ignore[method-assign]


def _set_trap_at_the_door() -> None:
    """A poison request kills any engine that it comes to, without a token."""
    from worker.runtime.loop import EngineLoop

    add = EngineLoop._add

    def trapped(self: EngineLoop, request: Any) -> None:
        if request.prompt_token_ids[0] == POISON_TOKEN:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, request)

    EngineLoop._add = trapped  # type: ignore[method-assign]


def _endanger_device(place: str) -> None:
    """What torch raises when a device is lost, or its memory is full, comes out of each step: where
    it is launched, where its logits are sampled from, or where its results arrive. Or out of a
    capture of graphs, which no step is needed for."""
    import torch

    from worker.model.cpu.native_stack import NativeStack
    from worker.model.layers.decoder import LayerByLayer
    from worker.model.sampling.sampler import Sampler
    from worker.model.step.forward_batch import ForwardBatch
    from worker.model.step.runner import TorchStepHandle

    def endanger(num_tokens: int) -> None:
        path, most_tokens = os.environ.get(DEVICE), os.environ.get(MEMORY)
        if path is not None and os.path.exists(path):
            with open(path) as file:
                left = int(file.read())
            if left == 0:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            with open(path, "w") as file:
                file.write(str(left - 1))
        if most_tokens is not None and num_tokens > int(most_tokens):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    build, sample, collect = ForwardBatch.build, Sampler.sample, TorchStepHandle._collect

    def endangered_build(batch: Any, **options: Any) -> ForwardBatch:
        endanger(batch.num_tokens)
        return build(batch, **options)

    def endangered_sample(self: Sampler, logits: Any, rows: Any, previous: Any) -> Any:
        endanger(len(rows))
        return sample(self, logits, rows, previous)

    def endangered_collect(self: TorchStepHandle) -> Any:
        if num_rows := sum(len(part.seq_ids) for part in self._parts):
            endanger(num_rows)
        return collect(self)

    def endangered_capture(self: object, report: Any, *, largest_only: bool = False) -> None:
        endanger(0)
        report(1.0)

    match place:
        case "launch":
            ForwardBatch.build = endangered_build  # type: ignore[method-assign,assignment]
        case "sampler":
            Sampler.sample = endangered_sample  # type: ignore[method-assign]
        case "collect":
            TorchStepHandle._collect = endangered_collect  # type: ignore[method-assign]
        case "capture":  # of which no stack on a CPU has any
            for stack in (NativeStack, LayerByLayer):
                stack.capture = endangered_capture  # type: ignore[attr-defined]
                stack.best_tokens = lambda self: None  # type: ignore[attr-defined]
        case _:
            raise ValueError(place)


def _fit_throttle(path: str) -> None:
    """A step that gave some answer more than so many tokens (of this attempt) takes longer."""
    from worker.runtime.loop import EngineLoop

    send = EngineLoop._send
    num_tokens: Counter[str] = Counter()

    def throttled(self: EngineLoop, outputs: Any, *, with_stats: bool = False) -> None:
        send(self, outputs, with_stats=with_stats)
        longest = 0
        for output in outputs:
            num_tokens[output.request_id] += len(output.token_ids)
            longest = max(longest, num_tokens[output.request_id])
            if output.finish_reason is not None:
                del num_tokens[output.request_id]
        try:
            with open(path) as file:
                after, seconds = file.read().split()
        except FileNotFoundError:
            return
        if longest >= int(after):
            time.sleep(float(seconds))

    EngineLoop._send = throttled  # type: ignore[method-assign]


def _note_amx_calls(path: str) -> None:
    import torch

    from worker.engines.vllm import amx

    permit = amx.permit_amx

    def noted() -> bool:
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {torch.get_num_threads()}\n")
        return permit()

    amx.permit_amx = noted


def _shift_clock(offset_s: float) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + offset_s
    time.time_ns = lambda: now_ns() + int(offset_s * 1e9)


def _check_bodies(path: str) -> None:
    """The file of a frontend whose bodies are compared is there."""
    import api.process
    from tests.support.document_check import check_bodies, write_mismatch

    open(path, "a").close()
    create_app = api.process.create_app

    def checked(settings: Any) -> Any:
        return check_bodies(create_app(settings), write_mismatch)

    api.process.create_app = checked


def _pass_on() -> None:
    """The engine process gets the variables of tests, too: its environment is an allow-list."""
    os.environ.update(json.loads(os.environ.get(PASSED_ON, "{}")))
    ours = {n: v for n, v in os.environ.items() if n in NAMES or n.startswith("CHAOS_")}
    os.environ[PASSED_ON] = json.dumps(ours)


def _set_faults() -> None:
    _pass_on()
    if "worker.runtime" in sys.orig_argv:
        if SCRIPT in os.environ:
            from tests.support.scripted_model import play

            play(os.environ[SCRIPT])
        elif os.environ.get("PENSTOCK_RUNNER") == "echo":
            _set_traps()
        elif TRAP in os.environ:
            _set_trap_at_the_door()
        elif DEVICE in os.environ or MEMORY in os.environ:
            _endanger_device(os.environ.get(PLACE, "launch"))
        if THROTTLE in os.environ:
            _fit_throttle(os.environ[THROTTLE])
    is_vllms = "worker.runtime" in sys.orig_argv or "--multiprocessing-fork" in sys.orig_argv
    if AMX_CALLS in os.environ and is_vllms:
        _note_amx_calls(os.environ[AMX_CALLS])
    if "CHAOS_CLOCK_OFFSET_S" in os.environ:
        _shift_clock(float(os.environ["CHAOS_CLOCK_OFFSET_S"]))
    if "CHAOS_SCHEMA" in os.environ and "worker.runtime" not in sys.orig_argv:
        import next_release

        next_release.become(int(os.environ["CHAOS_SCHEMA"]))
    if "JOB_HISTORY" in os.environ and sys.orig_argv[-2:] == ["-m", "worker"]:
        from pathlib import Path

        from tests.support.job_history import record_worker_calls

        record_worker_calls(Path(os.environ["JOB_HISTORY"]))
    if "DOCUMENT_CHECKED" in os.environ and sys.orig_argv[-2:] == ["-m", "api"]:
        _check_bodies(os.environ["DOCUMENT_CHECKED"])


try:
    _set_faults()
except Exception:  # Python would print it and go on without the fault, and a test would show less
    traceback.print_exc()
    os._exit(70)

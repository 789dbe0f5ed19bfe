"""The engine's own process: `python -m worker.engine_process <fd> <parent pid>`.

It has the device and nothing else. The service starts it with one end of a socket pair and sends
Configure; it answers with progress, then EngineReady, and runs the EngineLoop until the service
closes the socket or dies. Exit status: 0 after Shutdown or when the service is gone, 1 when the
engine cannot be built or fails its self-test (LoadFailed is sent before), 70 after an unexpected
exception, 71 when no further step can succeed in this process (EngineEnds is sent before).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

from shared.cores import default_threads
from shared.huge_pages import collapse_heap
from shared.logs import start_logs
from shared.process import die_with_parent
from worker.engine.batch import ScheduledBatch
from worker.engine.config import EngineConfig
from worker.engine.echo_runner import EchoModelRunner
from worker.engine.engine import Engine
from worker.engine.errors import EngineFailed
from worker.engine.ports import ModelRunner, StepHandle, StepResult
from worker.engine_options import EngineOptions
from worker.engine_process.loop import EngineLoop, EngineSocket, LinkClosed
from worker.engine_process.messages import (
    Configure,
    EngineEnds,
    EngineReady,
    LoadFailed,
    LoadProgress,
    Shutdown,
)
from worker.model.errors import ModelError

EXIT_NOT_BUILT = 1
EXIT_UNEXPECTED = 70
EXIT_ENGINE_FAILED = 71

ECHO_NUM_BLOCKS = 4096
ECHO_BLOCK_SIZE = 16
ECHO_MAX_MODEL_LEN = 4096
PROGRESS_STEP = 0.01

log = logging.getLogger(__name__)


def main() -> int:
    """Runs an engine for the service at the other end of the socket; returns the exit status.

    The module's docstring lists them. Raises TypeError when the first message is not Configure.
    """
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides when to end
    die_with_parent(parent_pid, signal.SIGKILL)  # whatever is being computed then
    link = EngineSocket(socket.socket(fileno=fd))
    try:
        configure, *others = link.receive(wait=True)
    except LinkClosed:
        return 0
    if not isinstance(configure, Configure):
        raise TypeError(f"the first message must be Configure, not {type(configure).__name__}")
    if others:  # the service was stopped while this process started
        assert all(isinstance(message, Shutdown) for message in others), (
            "EngineReady was not sent yet"
        )
        return 0
    logs = start_logs(
        configure.log_level,
        configure.log_format,
        fields={"process": "engine"},
    )
    try:
        return _serve(configure.options, link)
    except LinkClosed:
        log.info("the service is gone; ending")
        return 0
    except Exception:
        log.critical("the engine process ends after an unexpected error", exc_info=True)
        return EXIT_UNEXPECTED
    finally:
        logs.stop()


def _serve(options: EngineOptions, link: EngineSocket) -> int:
    begin_s = time.monotonic()
    # Before torch is imported: its thread pools read this once.
    num_threads = str(options.num_threads or default_threads())
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = num_threads
    try:
        engine, ready = _build(options, link, begin_s)
        # A device that fails for good is found here, and not by the first jobs.
        engine.self_test()
    except (ModelError, ValueError, OSError) as error:
        link.send(LoadFailed(str(error), by_settings=True))
        return EXIT_NOT_BUILT
    except LinkClosed:
        raise
    except Exception as error:
        log.error("the engine could not be built", exc_info=True)
        link.send(LoadFailed(f"{type(error).__name__}: {error}", by_settings=False))
        return EXIT_NOT_BUILT
    collapse_heap()
    link.send(ready)
    try:
        EngineLoop(engine, link).run()
    except EngineFailed as error:
        log.critical(
            "the engine cannot continue", extra={"error": f"{type(error).__name__}: {error}"}
        )
        link.send(EngineEnds(f"{type(error).__name__}: {error}"))
        return EXIT_ENGINE_FAILED
    return 0


def _build(
    options: EngineOptions, link: EngineSocket, begin_s: float
) -> tuple[Engine, EngineReady]:
    if options.runner == "echo":
        config, runner = _echo(options)
        num_parameters, dtype = 0, "echo"
    else:
        # torch comes in here and nowhere else: an echo engine starts without it.
        from worker.model.build import build_model

        built = build_model(options, _Progress(link))
        config, runner = built.engine_config, built.runner
        num_parameters, dtype = built.num_parameters, built.dtype
    engine = Engine(config, runner, clock=time.perf_counter)
    ready = EngineReady(
        config=config,
        vocab_size=runner.vocab_size,
        num_parameters=num_parameters,
        dtype=dtype,
        load_s=time.monotonic() - begin_s,
        stats=dataclasses.asdict(engine.stats()),
    )
    return engine, ready


def _echo(options: EngineOptions) -> tuple[EngineConfig, ModelRunner]:
    checkpoint = json.loads((Path(options.checkpoint) / "config.json").read_bytes())
    max_model_len = options.max_model_len or checkpoint.get("max_position_embeddings")
    config = options.engine_config(
        num_blocks=options.num_kv_blocks or ECHO_NUM_BLOCKS,
        block_size=options.block_size or ECHO_BLOCK_SIZE,
        max_model_len=int(max_model_len or ECHO_MAX_MODEL_LEN),
    )
    runner: ModelRunner = EchoModelRunner(int(checkpoint["vocab_size"]))
    if options.echo_step_ms:
        runner = PacedRunner(runner, options.echo_step_ms / 1000)
    return config, runner


class _Progress:
    """Passes progress on, at most once per stage and hundredth."""

    def __init__(self, link: EngineSocket) -> None:
        self._link = link
        self._stage = ""
        self._fraction = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        if stage == self._stage and fraction - self._fraction < PROGRESS_STEP and fraction < 1:
            return
        self._stage, self._fraction = stage, fraction
        self._link.send(LoadProgress(stage, fraction))


class PacedRunner:
    """A ModelRunner whose steps take a set time, as a device's would.

    Wraps another runner; `collect` returns no sooner than `step_s` after `launch`.
    """

    def __init__(self, inner: ModelRunner, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self.vocab_size = inner.vocab_size

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        return _PacedStep(self._inner.launch(batch), time.monotonic() + self._step_s)


class _PacedStep:
    def __init__(self, inner: StepHandle, ready_at_s: float) -> None:
        self._inner = inner
        self._ready_at_s = ready_at_s

    def collect(self) -> StepResult:
        time.sleep(max(0.0, self._ready_at_s - time.monotonic()))
        return self._inner.collect()

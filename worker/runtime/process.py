"""The engine's own process: `python -m worker.runtime <fd> <parent pid>`.

It has the device and nothing else. The service starts it with one end of a socket pair and sends
Configure; it answers with progress, then EngineReady, and runs the EngineLoop until the service
closes the socket or dies. Exit status: 0 after Shutdown or when the service is gone, 1 when the
engine cannot be built or fails its self-test (LoadFailed is sent before), 70 after an unexpected
exception, 71 when no further step can succeed in this process (EngineEnds is sent before), 72 when
a process that has a part of the model has ended, or is out of step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from shared.cores import default_threads, wait_asleep
from shared.huge_pages import collapse_heap
from shared.logs import Logs, start_logs
from shared.process import die_with_parent
from worker.engine.errors import EngineFailed, UpstreamsLost
from worker.engine.interface import BuiltEngine, Progress
from worker.engine_options import EngineOptions
from worker.model.errors import ModelError, is_transient
from worker.runtime.loop import EngineLoop, EngineSocket, LinkClosed
from worker.runtime.messages import (
    EXIT_RANK_LOST,
    Configure,
    EngineEnds,
    EngineReady,
    LoadFailed,
    LoadProgress,
    Prepare,
    Shutdown,
)

EXIT_NOT_BUILT = 1
EXIT_UNEXPECTED = 70
EXIT_ENGINE_FAILED = 71

PROGRESS_STEP = 0.01

_OF_EVERY_LOAD = (
    "worker.engines.penstock",
    "worker.model.build",
    "shared.text.checkpoint_text",
    "worker.model.sampling.grammar_masks",
)

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
        if isinstance(configure, Prepare):
            _import_engine(configure.options)
            configure, *others = others or link.receive(wait=True)
    except LinkClosed:
        return 0
    if isinstance(configure, Shutdown):
        return 0
    if not isinstance(configure, Configure):
        raise TypeError(f"the first message must be Configure, not {type(configure).__name__}")
    if others:  # the service was stopped while this process started
        assert all(isinstance(message, Shutdown) for message in others), (
            "EngineReady was not sent yet"
        )
        return 0
    logs = start_logs(configure.log_level, configure.log_format, process="worker", part="engine")
    logs.identity.is_worker(configure.worker_id)
    try:
        status = _serve(configure.options, link, logs)
        if _leaves_nothing(configure.options):
            logs.stop()
            os._exit(status)
        return status
    except LinkClosed:
        log.info("the worker process ended; exiting")
        return 0
    except Exception:
        log.critical("the engine process failed unexpectedly", exc_info=True)
        return EXIT_UNEXPECTED
    finally:
        logs.stop()


def _leaves_nothing(options: EngineOptions) -> bool:
    """Returns whether this process may end without the interpreter's clean-up, which takes a part
    of a second for a model: it has no other processes, and no file to complete."""
    is_alone = options.engine == "penstock" and options.tensor_parallel_size == 1
    return is_alone and not options.kv_offloading_dir


def _serve(options: EngineOptions, link: EngineSocket, logs: Logs) -> int:
    begin_s = time.monotonic()
    _set_threads(options)

    def end(sentence: str) -> None:
        log.critical("the engine cannot continue", extra={"error": sentence})
        logs.stop()
        os._exit(EXIT_RANK_LOST)  # the computing thread may wait forever

    try:
        built = _build(options, _Progress(link), end)
        # A device that fails for good is found here, and not by the first jobs.
        built.engine.self_test()
    except (ModelError, ValueError, OSError) as error:
        link.send(LoadFailed(str(error), by_settings=not is_transient(error)))
        return EXIT_NOT_BUILT
    except LinkClosed:
        raise
    except Exception as error:
        log.error("the engine failed to start", exc_info=True)
        link.send(LoadFailed(f"{type(error).__name__}: {error}", by_settings=False))
        return EXIT_NOT_BUILT
    link.send(
        EngineReady(
            config=built.config,
            vocab_size=built.vocab_size,
            num_parameters=built.num_parameters,
            dtype=built.dtype,
            engine_name=options.engine,
            engine_version=built.version,
            exact_resume=built.exact_resume,
            device=built.device,
            embedding_size=built.embedding_size,
            load_s=time.monotonic() - begin_s,
            stats=dataclasses.asdict(built.engine.stats()),
        )
    )
    # Beside the first steps: no job waits for it.
    threading.Thread(target=collapse_heap, name="collapse-heap", daemon=True).start()
    try:
        EngineLoop(built.engine, link).run()
    except EngineFailed as error:
        log.critical(
            "the engine cannot continue", extra={"error": f"{type(error).__name__}: {error}"}
        )
        lost = isinstance(error, UpstreamsLost)
        link.send(EngineEnds(f"{type(error).__name__}: {error}", by_upstreams=lost))
        return EXIT_ENGINE_FAILED
    return 0


def _set_threads(options: EngineOptions) -> None:
    """Sets the threads of torch, which reads them once: call it before the import."""
    num_threads = str(options.num_threads or default_threads())
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = num_threads
    wait_asleep(os.environ)


def _import_engine(options: EngineOptions) -> None:
    """Imports torch and our own engine over it, most of the CPU time of a small model's load."""
    _set_threads(options)
    for name in _OF_EVERY_LOAD:
        with contextlib.suppress(ImportError):  # a load without it logs why
            importlib.import_module(name)
    if options.device == "cpu":
        importlib.import_module("worker.model.cpu.native_ops")


def _build(
    options: EngineOptions, report: Progress, on_rank_end: Callable[[str], None]
) -> BuiltEngine:
    # Imported here: vLLM's environment may lack our own engine's dependencies.
    if options.engine == "vllm":
        from worker.engines.vllm.build import build_vllm_engine

        return build_vllm_engine(options, report, on_rank_end)
    if options.engine == "http":
        from worker.engines.http.build import build_http_engine

        return build_http_engine(options, report)
    from worker.engines.penstock import build_own_engine

    return build_own_engine(options, report, on_rank_end)


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

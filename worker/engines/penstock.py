"""Our own engine in the engine process: over a model of worker.model, or over the echo runner."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path

from shared.collector import resting
from worker.engine.batch import ScheduledBatch
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.interface import BuiltEngine, Progress
from worker.engine.measures import StepMeasures
from worker.engine.ports import ModelRunner, StepHandle, StepResult
from worker.engine_options import EngineOptions
from worker.engines.echo import EchoModelRunner
from worker.model.config.preflight import check_checkpoint

ECHO_NUM_BLOCKS = 4096
ECHO_BLOCK_SIZE = 16
ECHO_MAX_MODEL_LEN = 4096


def build_own_engine(
    options: EngineOptions, report: Progress, on_rank_end: Callable[[str], None]
) -> BuiltEngine:
    """Loads the model. Raises ModelError, ValueError or OSError with a sentence.

    `on_rank_end` gets a sentence, in any thread, when another rank has ended.
    """
    if options.runner == "echo":
        config, runner = _echo(options)
        num_parameters, dtype, mask_times = 0, "echo", None
    else:
        check_checkpoint(options)
        processes = None
        if options.tensor_parallel_size > 1 and sys.platform == "linux":  # elsewhere it is refused
            from worker.model.parallel.processes import RankProcesses

            processes = RankProcesses(options)  # they import torch while this process does
        # torch comes in here and nowhere else: an echo engine starts without it.
        with resting():
            from worker.model.build import build_model

        built = build_model(options, report, on_rank_end, processes)
        config, runner = built.engine_config, built.runner
        num_parameters, dtype = built.num_parameters, built.dtype
        mask_times = built.mask_times
    engine = Engine(config, runner, clock=time.perf_counter)
    engine.measures = StepMeasures(mask_times.drain if mask_times is not None else dict)
    return BuiltEngine(
        engine=engine,
        config=config,
        vocab_size=runner.vocab_size,
        num_parameters=num_parameters,
        dtype=dtype,
    )


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

    def sample_structured(self, seq_ids: Collection[int]) -> Mapping[int, Future[None]]:
        return self._inner.sample_structured(seq_ids)

    def collect(self) -> StepResult:
        time.sleep(max(0.0, self._ready_at_s - time.monotonic()))
        return self._inner.collect()

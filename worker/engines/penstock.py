"""Our own engine in the engine process: over a model of worker.model, over the echo runner, or over
a model that makes embeddings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from shared.collector import resting
from worker.engine.engine import Engine
from worker.engine.interface import BuiltEngine, Progress
from worker.engine_options import EngineOptions
from worker.engines.echo import echo_runner
from worker.model.config.pooling import pooling_config
from worker.model.config.preflight import check_checkpoint


def build_own_engine(
    options: EngineOptions, report: Progress, on_rank_end: Callable[[str], None]
) -> BuiltEngine:
    """Loads the model. Raises ModelError, ValueError or OSError with a sentence.

    `on_rank_end` gets a sentence, in any thread, when another rank has ended.
    """
    pooling = pooling_config(options.checkpoint, options.runner)
    if pooling is not None:
        check_checkpoint(options)
        with resting():
            from worker.engines.pooling.build import build_pooling_engine

        return build_pooling_engine(options, pooling, report)
    if options.runner == "echo":
        config, runner = echo_runner(options)
        num_parameters, dtype, mask_times, disk = 0, "echo", None, None
        device, exact_resume = "auto", True
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
        mask_times, disk = built.mask_times, built.disk
        device, exact_resume = built.device, built.exact_resume
    engine = Engine(config, runner, clock=time.perf_counter, disk=disk)
    if mask_times is not None:
        engine.measures.drain_masks = mask_times.drain
    return BuiltEngine(
        engine=engine,
        config=config,
        vocab_size=runner.vocab_size,
        num_parameters=num_parameters,
        dtype=dtype,
        device=device,
        exact_resume=exact_resume,
    )

"""Milliseconds of the runner's steps, tier by tier, as JSON lines.

    python -m bench.forward_steps --tier reference packed native --quantization none int8
    python -m bench.forward_steps --shape smollm2-135m --model-impl native transformers
    python -m bench.forward_steps --device cuda --batch 1 8 32 64 128 256 --prefill 512 2048
    python -m bench.forward_steps --processes 2 --threads 1 --batch 2 8 32 --prefill

Random weights of a known shape; a step is everything between the engine's plan and the sampled
tokens. Each line also says how busy the machine was: `load` is the one-minute load average before
the run, `foreign` the cores that other processes used during it. With several processes each begins
a figure when all are there, and prints lines of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.machine import busy_s, cpu_name
from bench.shapes import SHAPES
from shared.cores import available_cores
from shared.messages import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.ports import ModelRunner
from worker.engine_options import CpuTier, EngineOptions, Quantization
from worker.model.build import build_model

COMMON = {"tie_word_embeddings": True, "dtype": "bfloat16"}
BLOCK_SIZE = 16
LOAD_TIMEOUT_S = 300.0  # between the processes
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


Meet = Callable[[], object]  # returns when all processes are there


def main() -> int:
    args = parse()
    if args.processes == 1:
        measure(args)
        return 0
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(args.processes, timeout=LOAD_TIMEOUT_S)
    started = [
        context.Process(target=measure, args=(args, barrier.wait)) for _ in range(args.processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return int(any(process.exitcode for process in started))


def measure(args: argparse.Namespace, meet: Meet = lambda: None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[args.shape] | COMMON
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for implementation in args.model_impl:
            for quantization in args.quantization:
                for tier in args.tier:
                    measure_tier(args, directory, implementation, tier, quantization, meet)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model-impl", nargs="+", default=["auto"])
    parser.add_argument("--tier", nargs="+", default=["auto"], help="on the CPU")
    parser.add_argument("--quantization", nargs="+", default=["none"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens before a decode step")
    parser.add_argument("--prefill", nargs="*", type=int, default=[512])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--ranks", type=int, default=1, help="TENSOR_PARALLEL_SIZE")
    parser.add_argument("--processes", type=int, default=1, help="that compute at the same time")
    parser.add_argument("--seconds", type=float, default=2.0, help="at least, for each figure")
    return parser.parse_args()


def measure_tier(
    args: argparse.Namespace,
    directory: str,
    implementation: str,
    tier: CpuTier,
    quantization: Quantization,
    meet: Meet,
) -> None:
    width = -(-(args.context + 1) // BLOCK_SIZE)
    most = max([*args.prefill, 1])
    begin_s = time.perf_counter()
    built = build_model(
        EngineOptions(
            checkpoint=directory,
            load_format="dummy",
            model_impl=implementation,  # type: ignore[arg-type]
            device=args.device,
            block_size=BLOCK_SIZE,
            num_kv_blocks=max(width * max([*args.batch, 1]), -(-most // BLOCK_SIZE)),
            num_threads=args.threads,
            tensor_parallel_size=args.ranks,
            cpu_tier=tier,
            quantization=quantization,
        )
    )
    common = {
        "shape": args.shape,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else cpu_name(),
        "model_impl": implementation,
        "tier": tier,
        "quantization": quantization,
        "threads": args.threads,
        "ranks": args.ranks,
        "load_s": round(time.perf_counter() - begin_s, 1),
        "torch": torch.__version__,
    }
    for i in range(max([*args.batch, 0])):
        # Memory that was never written is one page of zeros, which is always in the cache.
        fill = prefill(args.context, seq_id=i, first_block=i * width)
        built.runner.launch(ScheduledBatch((fill,))).collect()
    for size in args.batch:
        batch = ScheduledBatch(tuple(decode(i, args.context, width) for i in range(size)))
        report(
            common | {"step": "decode", "batch": size, "context": args.context},
            built.runner,
            batch,
            args.seconds,
            meet,
        )
    for length in args.prefill:
        batch = ScheduledBatch((prefill(length),))
        line = common | {"step": "prefill", "tokens": length}
        report(line, built.runner, batch, args.seconds, meet)
    built.close()


def decode(seq_id: int, context: int, width: int) -> ScheduledSequence:
    table = list(range(seq_id * width, (seq_id + 1) * width))
    known = [5 + seq_id] * (context + 1)
    return ScheduledSequence(seq_id, context, 1, known[-1:], table, True, GREEDY, known, [])


def prefill(length: int, *, seq_id: int = 0, first_block: int = 0) -> ScheduledSequence:
    known = [i % 1000 for i in range(length)]
    table = list(range(first_block, first_block + -(-length // BLOCK_SIZE)))
    return ScheduledSequence(seq_id, 0, length, known, table, True, GREEDY, known, [])


def report(
    line: dict[str, object],
    runner: ModelRunner,
    batch: ScheduledBatch,
    seconds: float,
    meet: Meet,
) -> None:
    def step() -> None:
        runner.launch(batch).collect()

    meet()
    load = os.getloadavg()[0]
    times, own, foreign = repeat(step, seconds)
    times.sort()
    line |= {
        "median_ms": round(times[len(times) // 2] * 1e3, 2),
        "mean_ms": round(sum(times) / len(times) * 1e3, 2),
        "best_ms": round(times[0] * 1e3, 2),
        "cpu_ms": round(own * 1e3, 2),
        "runs": len(times),
        "load": round(load, 2),
        "foreign": round(foreign, 2),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def repeat(step: Callable[[], None], seconds: float) -> tuple[list[float], float, float]:
    """Seconds of each run, at least 3; processor seconds of a mean one, which with one thread say
    most on a busy machine; and the cores that others used meanwhile."""
    step()
    times: list[float] = []
    begin_s, all_before, own_before = time.perf_counter(), busy_s(), time.process_time()
    while len(times) < 3 or time.perf_counter() - begin_s < seconds:
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    wall = time.perf_counter() - begin_s
    own = time.process_time() - own_before
    others = busy_s() - all_before - own
    return times, own / len(times), max(0.0, others / wall)


if __name__ == "__main__":
    sys.exit(main())

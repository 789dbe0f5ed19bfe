"""Milliseconds of the runner's steps, tier by tier, as JSON lines.

    python -m bench.forward_steps --tier reference packed native --quantization none int8
    python -m bench.forward_steps --shape smollm2-135m --model-impl native transformers
    python -m bench.forward_steps --device cuda --batch 1 8 32 64 128 256 --prefill 512 2048
    python -m bench.forward_steps --device cuda --mix 1x32768+255x512 256x638 --suffix 8192 32768
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
from itertools import chain, groupby
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
FILL = 2048  # tokens that are computed at once before the steps
SUFFIX = 16  # new tokens after a cached prefix
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
        longest = max([config["max_position_embeddings"], *(2 * n for n in args.suffix)])
        config |= {"max_position_embeddings": longest}
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
    parser.add_argument(
        "--mix", nargs="*", type=mix, default=[], help="decodes by context, as 1x32768+255x512"
    )
    parser.add_argument(
        "--suffix", nargs="*", type=int, default=[], help=f"cached tokens before {SUFFIX} new ones"
    )
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
    mixes = [[args.context] * size for size in args.batch] + args.mix
    decodes = [decodes_of(contexts) for contexts in mixes]
    suffixes = [prefill(SUFFIX, cached=cached) for cached in args.suffix]
    cached = most_blocks([*decodes, suffixes])  # that are filled before
    prompts = [prefill(length) for length in args.prefill]
    num_blocks = max(cached, most_blocks([[one] for one in prompts]), 1)
    longest = max(len(one.block_table) for one in chain(*decodes, suffixes, prompts))
    begin_s = time.perf_counter()
    built = build_model(
        EngineOptions(
            checkpoint=directory,
            load_format="dummy",
            model_impl=implementation,  # type: ignore[arg-type]
            device=args.device,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_blocks,
            max_num_seqs=max([1, *map(len, decodes)]),  # seats: of graphs too
            max_model_len=longest * BLOCK_SIZE,
            num_threads=args.threads,
            tensor_parallel_size=args.ranks,
            cpu_tier=tier,
            quantization=quantization,
        )
    )
    if len(built.engine_config.windows) > 1:
        sys.exit(f"{args.shape} has several KV groups; this bench gives blocks to one")
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
    at_once = min(FILL // BLOCK_SIZE, longest)
    for first in range(0, cached, at_once):
        # Memory that was never written is one page of zeros, which is always in the cache.
        length = BLOCK_SIZE * min(cached - first, at_once)
        built.runner.launch(ScheduledBatch((prefill(length, first_block=first),))).collect()
    for contexts, rows in zip(mixes, decodes, strict=True):
        line = common | {"step": "decode", "batch": len(rows), "context": written(contexts)}
        report(line, built.runner, ScheduledBatch(tuple(rows)), args, meet)
    for one, length in zip(suffixes, args.suffix, strict=True):
        line = common | {"step": "suffix", "tokens": SUFFIX, "context": length}
        report(line, built.runner, ScheduledBatch((one,)), args, meet)
    for one, length in zip(prompts, args.prefill, strict=True):
        line = common | {"step": "prefill", "tokens": length}
        report(line, built.runner, ScheduledBatch((one,)), args, meet)
    built.close()


def mix(text: str) -> list[int]:
    """Returns the contexts that `text` has, such as 1x32768+255x512."""
    found: list[int] = []
    for part in text.split("+"):
        count, context = map(int, part.split("x"))
        found += [context] * count
    return found


def written(contexts: list[int]) -> int | str:
    """Returns the contexts as --mix has them, or the one that all have."""
    counts = [f"{len(list(same))}x{context}" for context, same in groupby(contexts)]
    return contexts[0] if len(counts) == 1 else "+".join(counts)


def most_blocks(steps: list[list[ScheduledSequence]]) -> int:
    """Returns the blocks that any of these steps needs."""
    return max(
        (block + 1 for step in steps for one in step for block in one.block_table), default=0
    )


def decodes_of(contexts: list[int], num_groups: int = 1) -> list[ScheduledSequence]:
    """Returns a decode for each context, whose blocks follow one another."""
    rows, first = [], 0
    for seq_id, context in enumerate(contexts):
        rows.append(decode(seq_id, context, first_block=first, num_groups=num_groups))
        first += len(rows[-1].block_table)
    return rows


def decode(
    seq_id: int, context: int, *, first_block: int, num_groups: int = 1
) -> ScheduledSequence:
    table = list(range(first_block, first_block + num_groups * -(-(context + 1) // BLOCK_SIZE)))
    known = [5 + seq_id] * (context + 1)
    return ScheduledSequence(seq_id, context, 1, known[-1:], table, True, GREEDY, known, [])


def prefill(
    length: int,
    *,
    seq_id: int = 0,
    first_block: int = 0,
    cached: int = 0,
    num_groups: int = 1,
) -> ScheduledSequence:
    """`num_groups`: of layers, each of which has a block for each block of tokens."""
    known = [i % 1000 for i in range(cached + length)]
    table = list(range(first_block, first_block + num_groups * -(-len(known) // BLOCK_SIZE)))
    return ScheduledSequence(seq_id, cached, length, known[cached:], table, True, GREEDY, known, [])


def report(
    line: dict[str, object],
    runner: ModelRunner,
    batch: ScheduledBatch,
    args: argparse.Namespace,
    meet: Meet,
) -> None:
    # A device has the next decodes before the host knows the last ones' tokens, as in the engine.
    is_ahead = args.device == "cuda" and line["step"] == "decode"
    handles = [runner.launch(batch)] if is_ahead else []

    def step() -> None:
        handles.append(runner.launch(batch))
        handles.pop(0).collect()

    meet()
    load = os.getloadavg()[0]
    times, own, foreign = repeat(step, args.seconds)
    for handle in handles:
        handle.collect()
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

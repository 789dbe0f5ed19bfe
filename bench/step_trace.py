"""Where a decode step spends its time on the CUDA device: kernels by their share, and the gaps.

    python3 -m bench.step_trace --shape qwen3-0.6b --batch 1 256

Needs torch alone. Random weights; the steps are the runner's, as the engine launches them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.forward_steps import BLOCK_SIZE, COMMON, decodes_of
from bench.shapes import SHAPES
from worker.engine.batch import ScheduledBatch
from worker.engine_options import EngineOptions
from worker.model.build import build_model

STEPS = 20
KERNELS_SHOWN = 14


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 256])
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    width = -(-(args.context + 1) // BLOCK_SIZE)
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[args.shape] | COMMON
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        built = build_model(
            EngineOptions(
                checkpoint=directory,
                load_format="dummy",
                device="cuda",
                block_size=BLOCK_SIZE,
                num_kv_blocks=width * max(args.batch),
                max_num_seqs=max(args.batch),
                max_model_len=width * BLOCK_SIZE,
            )
        )
    for size in args.batch:
        batch = ScheduledBatch(tuple(decodes_of([args.context] * size)))
        for _ in range(3):
            built.runner.launch(batch).collect()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(STEPS):
                built.runner.launch(batch).collect()
            torch.cuda.synchronize()
        show(size, trace)
    return 0


def show(size: int, trace: profile) -> None:
    rows = [
        (event.key, event.self_device_time_total / STEPS, event.count / STEPS)
        for event in trace.key_averages()
        if event.self_device_time_total
    ]
    rows.sort(key=lambda row: -row[1])
    total = sum(us for _, us, _ in rows)
    launches = sum(count for _, _, count in rows)
    print(f"batch {size}: {total / 1e3:.2f} ms of kernels a step, {launches:.0f} launches")
    for name, us, count in rows[:KERNELS_SHOWN]:
        print(f"  {us:9.1f} us  {count:6.1f} x  {name[:90]}")


if __name__ == "__main__":
    sys.exit(main())

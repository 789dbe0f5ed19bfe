"""Times what drawing tokens costs a step on a CUDA device, by kernels and by torch's operators.

    python3 bench/cuda_sampling.py [--rows 256] [--vocab 151936] [--out FILE]

Medians of triton.testing.do_bench, with the L2 cache cleared before each call. `kernels` are the
launches alone, `whole` is `Sampler.sample` with its uploads, `host` what its caller waits. The
roofline is one reading of the logits, by the speed of a copy in the same run. Works from a bare
copy of the tree: torch, triton, numpy and no network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from triton.testing import do_bench

from shared.messages import SamplingParams
from worker.model.cuda.drawing import Drawn, draw_rows
from worker.model.sampling import cuda_kernels
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Sampler

PLAIN = SamplingParams(temperature=1.0, max_tokens=64, seed=0)
GREEDY = replace(PLAIN, temperature=0.0)
QWEN = replace(PLAIN, temperature=0.7, top_k=20, top_p=0.8)
CASES = {
    "greedy": ("peaked", GREEDY),
    "temperature": ("peaked", PLAIN),
    "top_p 0.95": ("peaked", replace(PLAIN, top_p=0.95)),
    "top_p 0.95, flat": ("flat", replace(PLAIN, top_p=0.95)),
    "top_k 50": ("peaked", replace(PLAIN, top_k=50)),
    "top_k 20, top_p 0.8, T 0.7": ("peaked", QWEN),
    "min_p 0.05": ("peaked", replace(PLAIN, min_p=0.05)),
    "penalties": ("peaked", replace(PLAIN, repetition_penalty=1.1, frequency_penalty=0.2)),
    "penalties, top_k 20, top_p 0.8": ("peaked", replace(QWEN, presence_penalty=1.5)),
    "bias of 300, min_tokens": (
        "peaked",
        replace(PLAIN, min_tokens=50, logit_bias={7 * i: 1.0 for i in range(300)}),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    shape = (arguments.rows, arguments.vocab)
    logits = {"peaked": peaked(shape, device, generator), "flat": flat(shape, device, generator)}
    ceiling = copy_speed(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    print(f"copy: {ceiling / 1e12:.2f} TB/s; {shape[0]} rows of {shape[1]}, bfloat16; ms")
    print(f"{'':32} kernels   whole    host  roofline   torch  t.host", flush=True)
    with torch.inference_mode():
        for name, (kind, params) in CASES.items():
            line = measured(logits[kind], params, ceiling, device)
            print(
                f"{name:32} {line['kernels_ms']:7.3f} {line['whole_ms']:7.3f} "
                f"{line['host_ms']:7.3f}  {line['roofline']:7.0%} {line['torch_ms']:8.3f} "
                f"{line['torch_host_ms']:7.3f}",
                flush=True,
            )
            if arguments.out is not None:
                with arguments.out.open("a", encoding="utf-8") as out:
                    entry = {"case": name, "logits": kind, "rows": shape[0], "vocab": shape[1]}
                    out.write(json.dumps({**entry, **line, "copy_bytes_per_s": ceiling}) + "\n")


def peaked(shape: tuple[int, int], device: torch.device, generator: torch.Generator) -> Tensor:
    """Returns bfloat16 logits [rows, vocab] as of a sure model: the likeliest token has a third,
    the n-th n**-1.5 of that."""
    rows, vocab = shape
    ranks = torch.arange(1, vocab + 1, device=device, dtype=torch.float32)
    order = torch.stack(
        [torch.randperm(vocab, device=device, generator=generator) for _ in range(rows)]
    )
    return (20 - 1.5 * ranks.log())[order].bfloat16()


def flat(shape: tuple[int, int], device: torch.device, generator: torch.Generator) -> Tensor:
    """Returns bfloat16 logits [rows, vocab] among which ten thousands are likely."""
    return torch.randn(shape, device=device, generator=generator).bfloat16()


def copy_speed(device: torch.device) -> float:
    """Returns bytes a second that a copy of 1 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (median(lambda: target.copy_(source)) * 1e-3)


def measured(
    logits: Tensor, params: SamplingParams, ceiling: float, device: torch.device
) -> dict[str, float]:
    rows = [
        SamplingRow(i, replace(params, seed=i), range(i, i + 100), [i, i], 102)
        for i in range(len(logits))
    ]
    nothing = torch.empty(0, dtype=torch.int64, device=device)

    def sampler(uses_kernels: bool) -> Sampler:
        return Sampler(
            logits.shape[1],
            max_num_seqs=len(rows),
            eos_token_ids=frozenset([3]),
            device=device,
            uses_kernels=uses_kernels,
        )

    ours, torchs = sampler(True), sampler(False)
    launches: list[tuple[Any, ...]] = []

    def noted(*given: Any) -> Drawn:
        launches.append(given)
        return draw_rows(*given)

    with patch.object(cuda_kernels, "draw_rows", noted):
        ours.sample(logits, rows, nothing)
    kernels_ms = median(lambda: draw_rows(*launches[0]))
    return {
        "kernels_ms": kernels_ms,
        "roofline": logits.numel() * 2 / ceiling / (kernels_ms * 1e-3),
        "whole_ms": median(lambda: ours.sample(logits, rows, nothing)),
        "host_ms": host_time(lambda: ours.sample(logits, rows, nothing)),
        "torch_ms": median(lambda: torchs.sample(logits, rows, nothing)),
        "torch_host_ms": host_time(lambda: torchs.sample(logits, rows, nothing)),
    }


def median(function: Callable[[], Any]) -> float:
    """Returns milliseconds of the device."""
    return float(do_bench(function, warmup=20, rep=100, return_mode="median"))


def host_time(function: Callable[[], Any]) -> float:
    """Returns milliseconds until the function returns, while the device has nothing to do."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()

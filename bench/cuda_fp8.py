"""FP8 products on this machine's CUDA device, beside the same in bfloat16.

    python3 -m bench.cuda_fp8 --out fp8.jsonl

Needs torch and Triton, no network and no installation. The products of a Qwen3-8B layer, with
random numbers: weights whose rows have scales (torch's product), weights with scales in blocks (our
kernel), and rounding the input alone. Each figure is the median of replays of a CUDA graph over
copies of the weight that are larger than the cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.cuda_kernels import median_s, report
from worker.model.base import FP8
from worker.model.cuda import fp8
from worker.model.layers import fp8 as twin
from worker.model.layers.fp8 import BLOCK, Fp8Weight

SHAPES = {
    "qkv": (4096, 6144),
    "output": (4096, 4096),
    "gate_up": (4096, 24_576),
    "down": (12_288, 4096),
}
ROWS = [1, 16, 64, 256, 2048, 8192]
WEIGHT_BYTES = 1 << 28  # at least, over all copies
TOLERANCE = 0.02  # of the norm: roundings to bfloat16


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    device = torch.device("cuda")
    if reason := fp8.unavailable_reason(device):
        print(f"FP8 products are unavailable: {reason}", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    lines = [
        report(measure(name, rows, device, graph_seconds), args.out)
        for name in SHAPES
        for rows in ROWS
    ]
    return 0 if all(line["equal"] for line in lines) else 1


def measure(
    name: str, rows: int, device: torch.device, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, object]:
    """Returns the microseconds of a product by each way, and whether those of FP8 are right."""
    size_in, size_out = SHAPES[name]
    copies = max(1, -(-WEIGHT_BYTES // (size_in * size_out)))
    x = torch.randn(rows, size_in, device=device).bfloat16()
    line: dict[str, object] = {"product": name, "rows": rows}
    is_equal = True
    for kind in ("rows", "blocks"):
        weights = [new_weight(size_in, size_out, kind, device) for _ in range(copies)]
        products = [fp8.Fp8Product(weight, None) for weight in weights]
        is_equal &= is_near(products[0](x[:64]), twin.fp8_linear(weights[0], None)(x[:64]))
        line[f"{kind}_us"] = in_us(seconds, [partial(multiply, x) for multiply in products])
        group = weights[0].group
        line[f"{kind}_rounding_us"] = in_us(seconds, [partial(fp8.quantize_rows, x, group)])
        del weights, products
    plain = [torch.randn(size_out, size_in, device=device).bfloat16() for _ in range(copies)]
    line["bf16_us"] = in_us(
        seconds, [partial(torch.nn.functional.linear, x, weight) for weight in plain]
    )
    return {**line, "equal": is_equal}


def new_weight(size_in: int, size_out: int, kind: str, device: torch.device) -> Fp8Weight:
    shape = (size_out // BLOCK, size_in // BLOCK) if kind == "blocks" else (size_out,)
    values = torch.randn(size_out, size_in, device=device).to(FP8)
    return Fp8Weight(values, torch.rand(shape, device=device) + 0.5)


def is_near(found: Tensor, expected: Tensor) -> bool:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return bool(error <= TOLERANCE)


def in_us(
    seconds: Callable[[Callable[[], object]], float], runs: list[Callable[[], object]]
) -> float:
    def all_of_them() -> None:
        for run in runs:
            run()

    return round(seconds(all_of_them) / len(runs) * 1e6, 1)


def graph_seconds(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_s(graph.replay)


if __name__ == "__main__":
    raise SystemExit(main())

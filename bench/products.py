"""Our products of many rows beside oneDNN's packed ones, shape by shape, as JSON lines.

    python -m bench.products --shapes smollm2-135m qwen3-0.6b --rows 64 256 1024

Random weights of the layers' shapes, in bfloat16 and int8. The two run in turns of some calls, each
after a pause and some calls that do not count: the other's threads spin for a while after their
last call. Each line has the best of both in GFLOP/s (int8: GOP/s) and how ours compares: 1.0 is as
quick as oneDNN's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

import torch

from bench.machine import cpu_name
from bench.shapes import SHAPES
from shared.cores import available_cores
from worker.model.base import Multiply
from worker.model.cpu.library import NativeKernels, build, cpu_flags
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.onednn_ops import PACKED_OPS
from worker.model.cpu.processor import cpu_features

TURNS = 4
SPIN_S = 0.005
WARM_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = NativeKernels(build(cpu_flags(cpu_features())))
    kernels.set_num_threads(arguments.threads)
    facts = {"cpu": cpu_name(), "torch": torch.__version__, "threads": arguments.threads}
    for quantization in arguments.quantization:
        ours = NativeOps(kernels, quantization=quantization)
        theirs = PACKED_OPS[quantization]()
        for shape in arguments.shapes:
            for name, size_out, size_in, is_gated in layer_products(shape):
                weight = torch.randn(size_out, size_in).to(torch.bfloat16)
                make = "gated_linear" if is_gated else "linear"
                pair = [getattr(ops, make)(weight, None) for ops in (ours, theirs)]
                for rows in arguments.rows:
                    x = torch.randn(rows, size_in).to(torch.bfloat16)
                    best = in_turns(pair, x, arguments.seconds)
                    speeds = [2e-9 * rows * size_out * size_in / seconds for seconds in best]
                    line = facts | {
                        "shape": shape,
                        "product": name,
                        "quantization": quantization,
                        "rows": rows,
                        "ours": round(speeds[0], 1),
                        "onednn": round(speeds[1], 1),
                        "ratio": round(speeds[0] / speeds[1], 3),
                    }
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()


def layer_products(shape: str) -> Iterator[tuple[str, int, int, bool]]:
    """Name, outputs, inputs and whether it is gated, of each product of a layer."""
    facts = SHAPES[shape]
    hidden, inner = facts["hidden_size"], facts["intermediate_size"]
    heads, kv_heads = facts["num_attention_heads"], facts["num_key_value_heads"]
    dim = facts.get("head_dim", hidden // heads)
    yield "qkv", (heads + 2 * kv_heads) * dim, hidden, False
    yield "output", hidden, heads * dim, False
    yield "gate_up", 2 * inner, hidden, True
    yield "down", hidden, inner, False


@torch.inference_mode()
def in_turns(products: list[Multiply], x: torch.Tensor, seconds: float) -> list[float]:
    """Seconds of the quickest call of each."""
    best = [float("inf")] * len(products)
    for _ in range(TURNS):
        for place, product in enumerate(products):
            time.sleep(SPIN_S)
            begin_s = time.perf_counter()
            while (before_s := time.perf_counter()) < begin_s + WARM_S:
                product(x)
            end_s = before_s + seconds / TURNS
            while before_s < end_s:
                product(x)
                after_s = time.perf_counter()
                best[place] = min(best[place], after_s - before_s)
                before_s = after_s
    return best


if __name__ == "__main__":
    main()

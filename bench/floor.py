"""What a card could do at best: bytes and operations of a load, at ceilings measured on it.

    python3 -m bench.floor

prints the ceilings of this machine's CUDA device as one JSON line. Weights are read once a step and
each decode's keys and values once; prompts compute their products and their attention.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.workloads import Work

_BYTES = 2  # of a number, bfloat16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one card: bytes a second of a copy, read and written; operations a second of a product."""

    device: str
    copy_bytes_s: float
    product_flops_s: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model costs that ties its embedding, by its shape."""

    weight_bytes: int  # read in every step
    kv_bytes: int  # of a token's keys and values, in all layers
    token_flops: int  # of a token's products without those of the vocabulary
    attended_flops: int  # of a query for each token that it attends to

    @classmethod
    def of(cls, shape: dict[str, Any]) -> ModelCost:
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        dim = shape.get("head_dim") or hidden // heads
        attention = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden
        of_layers = layers * (attention + 3 * hidden * shape["intermediate_size"])
        return cls(
            weight_bytes=_BYTES * (of_layers + shape["vocab_size"] * hidden),
            kv_bytes=_BYTES * 2 * layers * kv_heads * dim,
            token_flops=2 * of_layers,
            attended_flops=4 * layers * heads * dim,
        )


def floor_s(cost: ModelCost, works: Sequence[Work], seats: int, ceilings: Ceilings) -> float:
    """Returns the least seconds of these requests where at most `seats` run at once."""
    outputs = [work.max_tokens for work in works]
    num_steps = max(max(outputs), -(-sum(outputs) // seats))
    num_attended = sum(
        len(work.prompt) * work.max_tokens + work.max_tokens * (work.max_tokens - 1) // 2
        for work in works
    )
    read = num_steps * cost.weight_bytes + num_attended * cost.kv_bytes
    flops = sum(
        len(work.prompt) * cost.token_flops + len(work.prompt) ** 2 // 2 * cost.attended_flops
        for work in works
    )
    return read / ceilings.copy_bytes_s + flops / ceilings.product_flops_s


def measured_ceilings() -> Ceilings | None:
    """Returns those of this machine's CUDA device; None where there is none.

    By a process of its own: the memory that it takes is the server's afterwards.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench.floor"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return Ceilings(**found) if found else None


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("null")
        return 0
    from bench.cuda_kernels import ceilings

    found = ceilings()
    name = torch.cuda.get_device_name()
    print(json.dumps(asdict(Ceilings(name, found.copy_gbs * 1e9, found.product_tflops * 1e12))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Kernels on this machine's CUDA device, beside what its memory and its products allow.

    python3 -m bench.cuda_kernels --out kernels.jsonl
    python3 -m bench.cuda_kernels --sweep        # other tiles, for the choice in attention.py

Needs torch and Triton, no network and no installation. Attention has the heads of Qwen3-8B: 32
queries, 8 keys, 128 numbers each. Products of a few rows are those of a layer of Qwen3-0.6B and 8B,
beside the operators that they take the place of. Each figure is the median of replays of a CUDA
graph over all layers of a pool that is larger than the cache; each variant is compared with torch's
operators first, and run twice for the same bits.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import AttentionMetadata, KVLayer
from worker.model.cuda import attention
from worker.model.cuda.attention import Tiles, TritonAttention
from worker.model.cuda.gemv import GatedProduct, Product, gemv
from worker.model.cuda.layers import add_norm
from worker.model.kv_cache import KVCachePool
from worker.model.layers.ops import Norm

HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK_SIZE = 32
POOL_BYTES = 1 << 30  # at least, over all layers
MOST_LAYERS = 36
DECODES = [(1, 1024), (1, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 8192)]
PREFILLS = [512, 2048, 8192]
FEW_ROWS = [1, 2, 4]
SIZES = [(1024, 3072, 2048), (4096, 12288, 4096)]  # hidden, of the feed-forward, of all query heads
DECODE_TILES = [
    Tiles(16, keys, warps, stages)
    for keys, warps, stages in [
        (32, 2, 3),
        (64, 2, 3),
        (64, 4, 2),
        (64, 4, 3),
        (128, 4, 2),
        (128, 8, 3),
    ]
]
CHUNK_TILES = [
    Tiles(128, 64, 8, 2),
    Tiles(128, 64, 8, 3),
    Tiles(128, 128, 8, 2),
    Tiles(128, 32, 4, 3),
    Tiles(64, 64, 4, 2),
    Tiles(64, 64, 4, 3),
]


@dataclass(frozen=True)
class Layers:
    kv_layers: tuple[KVLayer, ...]


@dataclass(frozen=True)
class Ceilings:
    copy_gbs: float  # read and written
    product_tflops: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--sweep", action="store_true", help="all tiles, not the chosen ones alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    lines = []
    limits = ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {limits.copy_gbs:,.0f} "
        f"GB/s, bf16 product {limits.product_tflops:,.0f} TFLOP/s"
    )
    for rows, context in DECODES:
        for tiles in DECODE_TILES if args.sweep else [None]:
            lines.append(report(decode(rows, context, limits, tiles), args.out))
    for rows in FEW_ROWS:
        for hidden, inner, projected in SIZES:
            lines.append(
                report(few_rows_of_layer(rows, hidden, inner, projected, limits), args.out)
            )
    for tokens in PREFILLS:
        for tiles in CHUNK_TILES if args.sweep else [None]:
            lines.append(report(prefill(tokens, limits, tiles), args.out))
    return 0 if all(line["equal"] and line["same_bits"] for line in lines) else 1


def report(line: dict[str, object], out: Path | None) -> dict[str, object]:
    print(" ".join(f"{name}={value}" for name, value in line.items()), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return line


def ceilings() -> Ceilings:
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product_s = median_s(lambda: left @ right)
    return Ceilings(8 * source.numel() / copy_s / 1e9, 2 * 8192**3 / product_s / 1e12)


def median_s(run: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def new_pool(num_blocks: int) -> KVCachePool:
    layer = KVLayer(KV_HEADS, DIM, DIM)
    layer_bytes = num_blocks * BLOCK_SIZE * layer.numbers * 2
    num_layers = min(MOST_LAYERS, max(1, -(-POOL_BYTES // layer_bytes)))
    pool = KVCachePool(
        Layers((layer,) * num_layers),
        num_blocks,
        BLOCK_SIZE,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    pool.storage.normal_()
    return pool


def metadata(query_lens: list[int], context_lens: list[int], table: Tensor) -> AttentionMetadata:
    ends = [0]
    for length in query_lens:
        ends.append(ends[-1] + length)

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    return AttentionMetadata(
        cu_q=on_device(ends),
        seq_lens=on_device(context_lens),
        block_table=table,
        slots=on_device([0] * ends[-1]),
        num_decodes=sum(length == 1 for length in query_lens),
        max_query_len=max(query_lens),
        num_tokens=ends[-1],
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
    )


def decode(rows: int, context: int, limits: Ceilings, tiles: Tiles | None) -> dict[str, object]:
    width = context // BLOCK_SIZE
    pool = new_pool(rows * width)
    table = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    step = metadata([1] * rows, [context] * rows, table)
    line = measure(pool, step, rows, "decode_tiles", tiles)
    seconds = float(line.pop("seconds"))  # type: ignore[arg-type]
    moved = rows * context * KV_HEADS * DIM * 2 * 2
    return {
        "kernel": "decode",
        "rows": rows,
        "context": context,
        "us": round(seconds * 1e6, 1),
        "gbs": round(moved / seconds / 1e9),
        "of_copy": round(moved / seconds / 1e9 / limits.copy_gbs, 3),
        **line,
    }


def prefill(tokens: int, limits: Ceilings, tiles: Tiles | None) -> dict[str, object]:
    width = tokens // BLOCK_SIZE
    pool = new_pool(width)
    table = torch.randperm(width, device="cuda").int().view(1, width)
    step = metadata([tokens], [tokens], table)
    line = measure(pool, step, tokens, "chunk_tiles", tiles)
    seconds = float(line.pop("seconds"))  # type: ignore[arg-type]
    operations = 4 * HEADS * DIM * tokens * (tokens + 1) / 2
    return {
        "kernel": "prefill",
        "rows": 1,
        "context": tokens,
        "us": round(seconds * 1e6, 1),
        "tflops": round(operations / seconds / 1e12),
        "of_product": round(operations / seconds / 1e12 / limits.product_tflops, 3),
        **line,
    }


def few_rows_of_layer(
    rows: int, hidden: int, inner: int, projected: int, limits: Ceilings
) -> dict[str, object]:
    """Measures the four products of a layer with norms, gate and residuals, both ways."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * math.sqrt(1 / shape[-1])

    norm = Norm(torch.ones(hidden, device="cuda", dtype=torch.bfloat16), 1e-6)
    keys = 2 * KV_HEADS * DIM
    layer_bytes = 2 * hidden * (2 * projected + keys + 3 * inner)
    layers = [
        (
            Product(random(projected + keys, hidden), None),
            Product(random(hidden, projected), None),
            GatedProduct(Product(random(2 * inner, hidden), None), "silu"),
            Product(random(hidden, inner), None),
        )
        for _ in range(max(2, -(-POOL_BYTES // layer_bytes)))
    ]
    x, attended = random(rows, hidden), random(rows, projected)

    def fused() -> Tensor:
        for qkv, output, gate_up, down in layers:
            gemv(x, qkv, norm=norm)
            between = gemv(attended, output, residual=x)
            result = gemv(gemv(between, gate_up, norm=norm), down, residual=between)
        return result

    def by_operators() -> Tensor:
        for qkv, output, gate_up, down in layers:
            qkv(add_norm(x, None, norm)[1])
            between, normed = add_norm(x.clone(), output(attended), norm)
            result = between + down(gate_up(normed))
        return result

    seen, expected = fused(), by_operators()
    same_bits = torch.equal(seen, fused())
    seconds = {}
    for name, run in (("fused", fused), ("operators", by_operators)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        seconds[name] = median_s(graph.replay) / len(layers)
    return {
        "kernel": "few rows",
        "rows": rows,
        "hidden": hidden,
        "us": round(seconds["fused"] * 1e6, 1),
        "operators_us": round(seconds["operators"] * 1e6, 1),
        "gbs": round(layer_bytes / seconds["fused"] / 1e9),
        "of_copy": round(layer_bytes / seconds["fused"] / 1e9 / limits.copy_gbs, 3),
        "equal": is_near(seen, expected),
        "same_bits": same_bits,
    }


def measure(
    pool: KVCachePool, step: AttentionMetadata, num_tokens: int, which: str, tiles: Tiles | None
) -> dict[str, object]:
    """Returns seconds of a layer, the tiles, and whether it gave what torch's operators give."""
    q = torch.randn(num_tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    chosen = getattr(attention, which)
    if tiles is not None:
        rows = max(
            tiles.rows,
            chosen(HEADS // KV_HEADS, DIM, q.dtype).rows if which == "decode_tiles" else 0,
        )
        setattr(attention, which, lambda *shape, is_narrow: replace(tiles, rows=rows))
    try:
        backend = TritonAttention(pool)
        backend.prepare(step)
        outs = [torch.full_like(q, torch.nan) for _ in range(2)]
        for out in outs:
            backend.attend(0, q, out)
        same_bits = torch.equal(outs[0], outs[1])
        equal = num_tokens > 4096 or is_near(outs[0], expected(pool, step, q))

        def run() -> None:
            for layer in range(len(pool.keys)):
                backend.attend(layer, q, outs[0])

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        seconds = median_s(graph.replay) / len(pool.keys)
    finally:
        setattr(attention, which, chosen)
    used = tiles or chosen(HEADS // KV_HEADS, DIM, q.dtype)
    return {
        "seconds": seconds,
        "tiles": f"{used.rows}x{used.keys}w{used.warps}s{used.stages}",
        "equal": equal,
        "same_bits": same_bits,
    }


def expected(pool: KVCachePool, step: AttentionMetadata, q: Tensor) -> Tensor:
    """Returns what torch's operators give: the step's own keys are in the pool already."""
    backend = SdpaAttention(pool)
    slot_of = torch.arange(0, step.num_tokens, device="cuda")
    if step.num_decodes:
        last = step.seq_lens.long() - 1
        blocks = step.block_table.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0].long()
        offsets = last % BLOCK_SIZE
    else:
        blocks = step.block_table[0].long()[slot_of // BLOCK_SIZE]
        offsets = slot_of % BLOCK_SIZE
    step = replace(step, slots=(blocks * BLOCK_SIZE + offsets).int())
    backend.prepare(step)
    out = torch.empty_like(q)
    k, v = (part[0][blocks, offsets].clone() for part in (pool.keys, pool.values))
    backend.store(0, k, v)
    backend.attend(0, q, out)
    return out


def is_near(seen: Tensor, reference: Tensor) -> bool:
    error = (seen.float() - reference.float()).norm() / reference.float().norm()
    return bool(error < 0.01)


if __name__ == "__main__":
    sys.exit(main())

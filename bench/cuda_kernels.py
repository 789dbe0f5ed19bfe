"""Kernels on this machine's CUDA device, beside what its memory and its products allow.

    python3 -m bench.cuda_kernels --out kernels.jsonl
    python3 -m bench.cuda_kernels --kernels decode suffix     # these alone
    python3 -m bench.cuda_kernels --sweep        # other tiles, for the choice in attention.py

Needs torch and Triton, no network and no installation. Attention has the heads of Qwen3-8B: 32
queries, 8 keys, 128 numbers each: of single queries with even and with uneven contexts, of whole
prompts beside torch's own attention (flash, cuDNN), and of a few tokens after a cached prefix.
Products of a few rows are those of a layer of Qwen3-0.6B and 8B, beside the operators that they
take the place of; "invariant", left out by default, is what PENSTOCK_BATCH_INVARIANT computes. Each
figure is the median of replays of a CUDA graph over all layers of a pool that is larger than the
cache; each variant is compared with torch's operators first, and run twice for the same bits.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import AttentionMetadata, KVLayer
from worker.model.cuda import attention
from worker.model.cuda.attention import Tiles, TritonAttention
from worker.model.cuda.gemv import GatedProduct, Product, gemv
from worker.model.cuda.invariant import InvariantProduct
from worker.model.cuda.layers import add_norm
from worker.model.kv_cache import KVCachePool
from worker.model.layers.ops import Norm

HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK_SIZE = 32
POOL_BYTES = 1 << 30  # at least, over all layers
MOST_LAYERS = 36
KERNELS = ["decode", "uneven", "suffix", "prefill", "few rows", "invariant"]
DECODES = [(1, 1024), (1, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 8192)]
# One long context beside many short ones, and even ones with as many keys.
UNEVEN = [[32_768] + [512] * 255, [638] * 256]
SUFFIX, PREFIXES = 16, [8192, 32_768, 131_072]  # new tokens, cached tokens
PREFILLS = [512, 2048, 8192]
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
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
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS[:-1])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    limits = ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {limits.copy_gbs:,.0f} "
        f"GB/s, bf16 product {limits.product_tflops:,.0f} TFLOP/s"
    )
    decode_tiles = DECODE_TILES if args.sweep else [None]
    chunk_tiles = CHUNK_TILES if args.sweep else [None]
    sizes = [(rows, *size) for rows in FEW_ROWS for size in SIZES]
    runs: dict[str, list[Callable[[], dict[str, object]]]] = {
        "decode": [
            partial(decode, [context] * rows, limits, tiles)
            for rows, context in DECODES
            for tiles in decode_tiles
        ],
        "uneven": [
            partial(decode, contexts, limits, tiles)
            for contexts in UNEVEN
            for tiles in decode_tiles
        ],
        "suffix": [
            partial(suffix, SUFFIX, cached, limits, tiles)
            for cached in PREFIXES
            for tiles in chunk_tiles
        ],
        "prefill": [
            partial(prefill, tokens, limits, tiles) for tokens in PREFILLS for tiles in chunk_tiles
        ],
        "few rows": [partial(few_rows_of_layer, *size, limits) for size in sizes],
        "invariant": [
            *(
                partial(decode, contexts, limits, None, is_invariant=True)
                for contexts in ([1024], [1024] * 256, UNEVEN[0])
            ),
            partial(prefill, 2048, limits, None, is_invariant=True),
            *(partial(invariant_product, rows, limits) for rows in (1, 64, 256, 2048)),
        ],
    }
    lines = [report(run(), args.out) for name in args.kernels for run in runs[name]]
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
        block_tables=table[None],
        slots=on_device([0] * ends[-1])[None],
        num_decodes=sum(length == 1 for length in query_lens),
        max_query_len=max(query_lens),
        num_tokens=ends[-1],
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
    )


def tables(context_lens: list[int]) -> tuple[int, Tensor]:
    """Returns how many blocks sequences of these lengths have, and the table of them, in no
    order."""
    widths = [-(-length // BLOCK_SIZE) for length in context_lens]
    blocks = torch.randperm(sum(widths), device="cuda").int()
    table = torch.zeros((len(widths), max(widths)), dtype=torch.int32, device="cuda")
    for row, own in enumerate(blocks.split(widths)):
        table[row, : len(own)] = own
    return len(blocks), table


def decode(
    contexts: list[int], limits: Ceilings, tiles: Tiles | None, *, is_invariant: bool = False
) -> dict[str, object]:
    num_blocks, table = tables(contexts)
    step = metadata([1] * len(contexts), contexts, table)
    pool = new_pool(num_blocks)
    line = measure(pool, step, "decode_tiles", tiles, is_invariant=is_invariant)
    longest, shortest = max(contexts), min(contexts)
    return {
        "kernel": "invariant decode" if is_invariant else "decode",
        "rows": len(contexts),
        "context": longest if longest == shortest else f"{longest} to {shortest}",
        **of_bytes(line, sum(contexts), limits),
    }


def suffix(tokens: int, cached: int, limits: Ceilings, tiles: Tiles | None) -> dict[str, object]:
    num_blocks, table = tables([cached + tokens])
    step = metadata([tokens], [cached + tokens], table)
    line = measure(new_pool(num_blocks), step, "chunk_tiles", tiles)
    return {
        "kernel": "suffix",
        "rows": tokens,
        "context": cached,
        **of_bytes(line, cached + tokens, limits),
    }


def of_bytes(line: dict[str, object], keys: int, limits: Ceilings) -> dict[str, object]:
    """Returns a line of `measure` by the bytes of so many keys and values, read once."""
    seconds = float(line.pop("seconds"))  # type: ignore[arg-type]
    moved = keys * KV_HEADS * DIM * 2 * 2
    return {
        "us": round(seconds * 1e6, 1),
        "gbs": round(moved / seconds / 1e9),
        "of_copy": round(moved / seconds / 1e9 / limits.copy_gbs, 3),
        **line,
    }


def prefill(
    tokens: int, limits: Ceilings, tiles: Tiles | None, *, is_invariant: bool = False
) -> dict[str, object]:
    num_blocks, table = tables([tokens])
    step = metadata([tokens], [tokens], table)
    pool = new_pool(num_blocks)
    line = measure(pool, step, "chunk_tiles", tiles, is_invariant=is_invariant)
    seconds = float(line.pop("seconds"))  # type: ignore[arg-type]
    operations = 4 * HEADS * DIM * tokens * (tokens + 1) / 2
    peers = (
        {}
        if tiles or is_invariant
        else {f"{name}_us": prompt_us(tokens, way) for name, way in PEERS.items()}
    )
    return {
        "kernel": "invariant prefill" if is_invariant else "prefill",
        "rows": 1,
        "context": tokens,
        "us": round(seconds * 1e6, 1),
        "tflops": round(operations / seconds / 1e12),
        "of_product": round(operations / seconds / 1e12 / limits.product_tflops, 3),
        **peers,
        **line,
    }


def prompt_us(tokens: int, way: SDPBackend) -> float | str:
    """Returns microseconds of torch's attention by this way, over keys that lie in a row and have
    the queries' number of heads; why not, where it cannot."""
    q, k, v = torch.randn(3, 1, HEADS, tokens, DIM, device="cuda").bfloat16()
    try:
        with sdpa_kernel([way]):
            seconds = median_s(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    except RuntimeError as error:
        return str(error).splitlines()[0].replace(" ", "_")
    return round(seconds * 1e6, 1)


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
        "equal": is_near(seen, expected, 0.03),  # each way rounds five times in a row
        "same_bits": same_bits,
    }


def invariant_product(rows: int, limits: Ceilings) -> dict[str, object]:
    """Measures the largest product of a layer of Qwen3-8B, beside the operator."""
    hidden, inner, _ = SIZES[-1]
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    weights = [
        (torch.randn(2 * inner, hidden, device="cuda") / math.sqrt(hidden)).bfloat16()
        for _ in range(max(2, POOL_BYTES // (4 * inner * hidden)))
    ]
    ways: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
        "invariant": lambda weight: InvariantProduct(weight, None),
        "operator": lambda weight: Product(weight, None),
    }
    seen, expected = (way(weights[0])(x) for way in ways.values())
    seconds = {}
    for name, way in ways.items():
        products = [way(weight) for weight in weights]

        def run(products: list[Callable[[Tensor], Tensor]] = products) -> None:
            for product in products:
                product(x)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        seconds[name] = median_s(graph.replay) / len(weights)
    return {
        "kernel": "invariant product",
        "rows": rows,
        "us": round(seconds["invariant"] * 1e6, 1),
        "operator_us": round(seconds["operator"] * 1e6, 1),
        "tflops": round(4 * rows * hidden * inner / seconds["invariant"] / 1e12, 1),
        "of_copy": round(4 * hidden * inner / seconds["invariant"] / 1e9 / limits.copy_gbs, 3),
        "equal": is_near(seen, expected),
        # Those of a row alone.
        "same_bits": torch.equal(seen[:1], ways["invariant"](weights[0])(x[:1])),
    }


def measure(
    pool: KVCachePool,
    step: AttentionMetadata,
    which: str,
    tiles: Tiles | None,
    *,
    is_invariant: bool = False,
) -> dict[str, object]:
    """Returns seconds of a layer, the tiles, and whether it gave what torch's operators give."""
    num_tokens = step.num_tokens
    q = torch.randn(num_tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    chosen = getattr(attention, which)
    if tiles is not None:
        rows = max(
            tiles.rows,
            chosen(HEADS // KV_HEADS, DIM, q.dtype).rows if which == "decode_tiles" else 0,
        )
        setattr(attention, which, lambda *shape, is_narrow: replace(tiles, rows=rows))
    try:
        backend = TritonAttention(pool, is_invariant=is_invariant)
        backend.prepare(step)
        outs = [torch.full_like(q, torch.nan) for _ in range(2)]
        for out in outs:
            backend.attend(0, q, out)
        same_bits = torch.equal(outs[0], outs[1])
        equal = num_tokens > 4096 or is_near(outs[0], expected(pool, step, q))

        def run() -> None:
            backend.prepare(step)  # dividing the work is part of a step
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
    if is_invariant:
        chosen = attention.invariant_tiles
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
    lens = torch.tensor(step.query_lens, device="cuda")
    row_of = torch.arange(len(lens), device="cuda").repeat_interleave(lens)
    # The new tokens of each sequence are its last ones.
    place = torch.arange(step.num_tokens, device="cuda") - step.cu_q[1:][row_of]
    place += step.seq_lens[row_of]
    blocks = step.block_tables[0, row_of, place // BLOCK_SIZE].long()
    offsets = place % BLOCK_SIZE
    step = replace(step, slots=(blocks * BLOCK_SIZE + offsets).int()[None])
    backend.prepare(step)
    out = torch.empty_like(q)
    k, v = (part[0][blocks, offsets].clone() for part in (pool.keys, pool.values))
    backend.store(0, k, v)
    backend.attend(0, q, out)
    return out


def is_near(seen: Tensor, reference: Tensor, most: float = 0.01) -> bool:
    error = (seen.float() - reference.float()).norm() / reference.float().norm()
    return bool(error < most)


if __name__ == "__main__":
    sys.exit(main())

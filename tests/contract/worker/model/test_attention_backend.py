"""Every AttentionBackend against float64 arithmetic: ragged batches over scattered blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from shared.messages import SamplingParams
from tests.support.table import table
from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.model.attention import scores as scores_module
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import FP8, AttentionBackend, KVLayer, LayerScores, Reach
from worker.model.config.model_config import ModelConfig
from worker.model.kv_cache import KVCachePool
from worker.model.layers.fp8 import saturated
from worker.model.sampling.base import PreviousSample
from worker.model.step.forward_batch import ForwardBatch

Make = Callable[[KVCachePool, Sequence[LayerScores] | None], AttentionBackend]
BACKENDS: dict[str, Make] = {"sdpa": SdpaAttention}
if has_triton():
    from worker.model.cuda.attention import TritonAttention

    BACKENDS["triton"] = TritonAttention
NUM_LAYERS = 2
PLAIN = LayerScores()
# (tokens already in the cache, tokens of this step) per sequence
Shape = list[tuple[int, int]]
MIXED = [(0, 1), (7, 1), (63, 1), (0, 9), (5, 3), (16, 16), (31, 2)]
SHAPES = {
    "one-token": [(0, 1)],
    "decodes": [(3, 1), (150, 1), (15, 1), (16, 1), (17, 1), (700, 1), (0, 1)],
    "prefill": [(0, 5), (0, 33)],
    "later-chunks": [(4, 4), (100, 7)],
    "mixed": MIXED,
}
HEADS = [(4, 4, 16), (4, 2, 32), (7, 1, 64)]
# Of the kernels; in the interpreter a case takes a second.
KERNEL_SHAPES = {"mixed": [(0, 1), (70, 1), (0, 9), (31, 2)]} if IS_INTERPRETED else SHAPES
KERNEL_BLOCK_SIZES = [16] if IS_INTERPRETED else [4, 16, 32]
of_kernels = pytest.mark.skipif("triton" not in BACKENDS, reason=NO_TRITON)


@dataclass(frozen=True)
class Step:
    """A prepared step: its tensors and what its answer must be."""

    batch: ScheduledBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    expected: torch.Tensor  # [T, heads, head_dim] float64


def config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 16,
            "hidden_size": heads * head_dim,
            "intermediate_size": 8,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
        }
    )


def filled_step(
    pool: KVCachePool,
    shape: list[tuple[int, int]],
    heads: int,
    layer: int,
    seed: int,
    scores: LayerScores = PLAIN,
    sinks: np.ndarray | None = None,
    dtype: torch.dtype | None = None,
) -> Step:
    """Random keys and values: the past in the pool, at scattered blocks; everything else is NaN.

    So are blocks wholly before what a query reaches, which have other owners by then.

    Of a pool in FP8 they are numbers of it. `dtype` is the step's, the pool's without it.
    """
    rng = np.random.default_rng(seed)
    kv_heads, head_dim = pool.keys[layer].shape[2:]
    value_dim = pool.values[layer].shape[3]
    size = pool.block_size
    free = rng.permutation(pool.num_blocks).tolist()
    pool.storage.fill_(torch.nan)
    sequences, parts, expected = [], [], []
    for seq_id, (past, new) in enumerate(shape):
        end = past + new
        table = [free.pop() for _ in range(-(-end // size))]
        q = rng.standard_normal((new, heads, head_dim))
        k, v = (rng.standard_normal((end, kv_heads, dim)) for dim in (head_dim, value_dim))
        if pool.storage.dtype is FP8:
            k, v = (saturated(torch.from_numpy(one)).double().numpy() for one in (k, v))
        for place in range(scores.reach.first(past) // size * size, past):
            block, offset = table[place // size], place % size
            pool.keys[layer][block, offset] = torch.from_numpy(k[place]).to(pool.storage)
            pool.values[layer][block, offset] = torch.from_numpy(v[place]).to(pool.storage)
        sequences.append(
            ScheduledSequence(
                seq_id, past, new, [0] * new, table, True, SamplingParams(), [0] * end, []
            )
        )
        parts.append((q, k[past:], v[past:]))
        expected.append(exact_attention(q, k, v, scores, sinks))
    q, k, v = (
        torch.from_numpy(np.concatenate([part[i] for part in parts])).to(
            pool.storage.device, dtype or pool.storage.dtype
        )
        for i in range(3)
    )
    return Step(ScheduledBatch(tuple(sequences)), q, k, v, torch.cat(expected))


def exact_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scores: LayerScores = PLAIN,
    sinks: np.ndarray | None = None,
) -> torch.Tensor:
    """Row by row, as the formula says."""
    new, heads, head_dim = q.shape
    past, group = len(k) - new, heads // k.shape[1]
    window, chunk = scores.reach.window, scores.reach.chunk
    out = np.zeros((new, heads, v.shape[2]))
    for t in range(new):
        place = past + t
        attended = [
            other
            for other in range(place + 1)
            if (window is None or place - other < window)
            and (chunk is None or place // chunk == other // chunk)
        ]
        for h in range(heads):
            keys, values = k[attended, h // group], v[attended, h // group]
            products = keys @ q[t, h] * (scores.scale or head_dim**-0.5)
            if scores.softcap:
                products = scores.softcap * np.tanh(products / scores.softcap)
            sink = [] if sinks is None else [sinks[h]]
            weights = np.exp(np.append(products, sink))
            out[t, h] = weights[: len(products)] @ values / weights.sum()
    return torch.from_numpy(out)


def attend(
    backend: AttentionBackend,
    pool: KVCachePool,
    step: Step,
    layer: int = 1,
    sinks: np.ndarray | None = None,
) -> torch.Tensor:
    device = pool.storage.device
    nothing = PreviousSample(torch.empty(0, dtype=torch.int64, device=device), {})
    forward = ForwardBatch.build(
        step.batch, block_size=pool.block_size, vocab_size=16, device=device, previous=nothing
    )
    backend.prepare(forward.metadata)
    out = step.q.new_full(step.expected.shape, 7.0)
    # Strided views, as a fused projection hands them over.
    q, k, v = (
        torch.cat([part, part], dim=1)[:, : part.shape[1]] for part in (step.q, step.k, step.v)
    )
    backend.store(layer, k, v)
    if sinks is None:
        backend.attend(layer, q, out)
    else:
        backend.attend(layer, q, out, torch.from_numpy(sinks).to(step.q))  # type: ignore[call-arg]
    return out


@table("shape", SHAPES.values())
@table(("heads", "kv_heads", "head_dim"), HEADS)
@table("block_size", [4, 16, 32])
def test_equals_the_formula(
    shape: Shape, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    check_plain("sdpa", shape, (heads, kv_heads, head_dim), block_size)


@pytest.mark.triton
@of_kernels
@table("shape", KERNEL_SHAPES.values())
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)  # each is compiled anew
@pytest.mark.parametrize("block_size", KERNEL_BLOCK_SIZES)
def test_kernels_equal_the_formula(
    shape: Shape, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    check_plain("triton", shape, (heads, kv_heads, head_dim), block_size)


def check_plain(backend: str, shape: Shape, heads: tuple[int, int, int], block_size: int) -> None:
    pool = KVCachePool(
        config(*heads),
        1024 // block_size + 8,
        block_size,
        device=torch_device(),
        dtype=torch.float32,
    )
    step = filled_step(pool, shape, heads[0], 1, seed=heads[0] * block_size)
    out = attend(BACKENDS[backend](pool, None), pool, step)
    torch.testing.assert_close(out.double().cpu(), step.expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_near_the_formula(backend: str) -> None:
    pool = KVCachePool(config(4, 2, 32), 64, 16, device=torch_device(), dtype=torch.bfloat16)
    step = filled_step(pool, MIXED, 4, 1, seed=3)
    out = attend(BACKENDS[backend](pool, None), pool, step)
    torch.testing.assert_close(out.double().cpu(), step.expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_a_cache_in_fp8_equals_the_formula_over_its_numbers(
    backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    pool = KVCachePool(config(4, 2, 32), 64, 16, device=torch_device(), dtype=FP8)
    step = filled_step(pool, MIXED, 4, 1, seed=3, dtype=dtype)
    out = attend(BACKENDS[backend](pool, None), pool, step)
    torch.testing.assert_close(out.double().cpu(), step.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fp8_does_not_hold_becomes_its_largest_number_or_nan(backend: str) -> None:
    device = torch_device()
    pool = KVCachePool(config(4, 2, 16), 4, 16, device=device, dtype=FP8)
    step = filled_step(pool, [(0, 5)], 4, 1, seed=3, dtype=torch.bfloat16)
    given = [1000.0, -1000.0, torch.inf, -torch.inf, torch.nan]
    expected = [448.0, -448.0, torch.nan, torch.nan, torch.nan]
    for new in (step.k, step.v):
        new[:, 0, 0] = torch.tensor(given, dtype=torch.bfloat16)
    attend(BACKENDS[backend](pool, None), pool, step)
    block = step.batch.sequences[0].block_table[0]
    for cache, new in ((pool.keys[1], step.k), (pool.values[1], step.v)):
        found = cache[block, :5].float()
        torch.testing.assert_close(
            found[:, 0, 0].cpu(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(found[:, :, 1:], new[:, :, 1:].float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_the_new_keys_and_values_and_nothing_else(backend: str) -> None:
    pool = KVCachePool(config(4, 2, 16), 64, 4, device=torch_device(), dtype=torch.float32)
    step = filled_step(pool, MIXED, 4, 1, seed=5)
    before = pool.storage.clone()
    attend(BACKENDS[backend](pool, None), pool, step)
    slots = [
        (sequence.block_table[place // 4], place % 4)
        for sequence in step.batch.sequences
        for place in range(sequence.start, sequence.end)
    ]
    for token, (block, offset) in enumerate(slots):
        assert torch.equal(pool.keys[1][block, offset], step.k[token])
        assert torch.equal(pool.values[1][block, offset], step.v[token])
        for view, new in ((pool.keys[1], step.k), (pool.values[1], step.v)):
            in_before = before.as_strided(view.shape, view.stride(), view.storage_offset())
            in_before[block, offset] = new[token]
    torch.testing.assert_close(pool.storage, before, rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class Layers:
    """A pool's layers that differ."""

    kv_layers: tuple[KVLayer, ...]


KINDS = {
    "window": LayerScores(reach=Reach(window=8)),
    "window-of-one": LayerScores(reach=Reach(window=1)),
    "window-longer-than-all": LayerScores(reach=Reach(window=4096)),
    "chunks": LayerScores(reach=Reach(chunk=6)),
    "window-in-chunks": LayerScores(reach=Reach(window=5, chunk=16)),
    "scale": LayerScores(scale=0.7),
    "softcap": LayerScores(softcap=0.8),
    "all": LayerScores(scale=0.4, softcap=1.5, reach=Reach(window=19)),
}


@table("kind", KINDS.values())
@table("shape", SHAPES.values())
@table("has_sinks", [False, True])
@table("block_size", [4, 16])
def test_layers_that_differ_equal_the_formula(
    kind: LayerScores,
    shape: Shape,
    has_sinks: bool,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scores_module, "_MAX_SCORES", 2000)  # several pieces
    check_layers("sdpa", kind, shape, has_sinks, block_size)


@pytest.mark.triton
@of_kernels
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@table("shape", KERNEL_SHAPES.values())
@table(("has_sinks", "block_size"), [(False, 4), (True, 16)])
def test_kernels_of_layers_that_differ_equal_the_formula(
    kind: LayerScores, shape: Shape, has_sinks: bool, block_size: int
) -> None:
    check_layers("triton", kind, shape, has_sinks, block_size)


def check_layers(
    backend: str, kind: LayerScores, shape: Shape, has_sinks: bool, block_size: int
) -> None:
    layers = (KVLayer(1, 8, 24), KVLayer(2, 32, 16), KVLayer(4, 16, 16))
    pool = KVCachePool(
        Layers(layers),
        1200 // block_size + 8,
        block_size,
        device=torch_device(),
        dtype=torch.float32,
    )
    sinks = np.array([0.3, -1.0, 2.0, 0.9]) if has_sinks else None
    step = filled_step(pool, shape, 4, 1, 7, kind, sinks)
    layer_scores = (LayerScores(), kind, LayerScores(scale=2.0))
    out = attend(BACKENDS[backend](pool, layer_scores), pool, step, sinks=sinks)
    torch.testing.assert_close(out.double().cpu(), step.expected, rtol=1e-4, atol=1e-5)
    assert pool.keys[0].isnan().all(), "another layer"
    assert pool.values[2].isnan().all(), "another layer"

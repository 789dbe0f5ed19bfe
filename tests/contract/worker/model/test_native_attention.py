"""The native attention kernel against float64 arithmetic, over its own block layout."""

from __future__ import annotations

import pytest
import torch

from shared.messages import SamplingParams
from tests.support.cpu_kernels import kernels, variants
from tests.support.table import table
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.model.base import LayerScores, Reach
from worker.model.config.model_config import ModelConfig
from worker.model.cpu.library import NativeKernels
from worker.model.cpu.native_stack import NativeAttention, work_list
from worker.model.kv_cache import KVCachePool
from worker.model.sampling.base import PreviousSample
from worker.model.step.forward_batch import ForwardBatch

BF16 = torch.bfloat16
PLAIN = LayerScores()
CPU = torch.device("cpu")
NUM_BLOCKS = 80
# (tokens already in the cache, tokens of this step) per sequence
SHAPES = {
    "one-token": [(0, 1)],
    "decodes": [(3, 1), (150, 1), (15, 1), (16, 1), (17, 1), (300, 1), (0, 1), (63, 1), (64, 1)],
    "prefill": [(0, 5), (0, 33), (0, 130)],
    "later-chunks": [(4, 4), (100, 7)],
    "over-spans": [(250, 20), (540, 30)],  # a pass of many rows is over 256 keys
    "mixed": [(0, 1), (7, 1), (63, 1), (0, 9), (5, 3), (16, 16), (31, 2)],
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> NativeKernels:
    return kernels(request.param)


def new_pool(kv_heads: int, head_dim: int, heads: int) -> KVCachePool:
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 16,
            "hidden_size": heads * head_dim,
            "intermediate_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
        }
    )
    return KVCachePool(config, NUM_BLOCKS, 16, device=CPU, dtype=BF16)


def places(pool: KVCachePool, layer: int, block: int, offset: int) -> tuple[torch.Tensor, ...]:
    """Views [kv_heads, head_dim] of one token's key and value, as the layout says."""
    _, size, kv_heads, head_dim = pool.keys[layer].shape
    keys = pool.keys[layer][block].view(kv_heads, head_dim // 2, size, 2)[:, :, offset]
    values = pool.values[layer][block].view(kv_heads, size // 2, head_dim, 2)
    return keys, values[:, offset // 2, :, offset % 2]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores_of: LayerScores = PLAIN
) -> torch.Tensor:
    new, heads, head_dim = q.shape
    group = heads // k.shape[1]
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    scale = head_dim**-0.5 if scores_of.scale is None else scores_of.scale
    scores = torch.einsum("thd,shd->hts", q.double(), k) * scale
    places = torch.arange(len(k))
    seen = scores_of.reach.mask(places[len(k) - new :, None], places[None])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def run_step(
    backend: NativeAttention,
    pool: KVCachePool,
    shape: list[tuple[int, int]],
    heads: int,
    seed: int = 0,
    layer: int = 1,
    scores: LayerScores = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step over scattered blocks; every place that is not a past token holds NaN, and so do
    blocks wholly before what a query reaches."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, head_dim = pool.keys[0].shape[2:]
    free = torch.randperm(pool.num_blocks, generator=generator).tolist()
    pool.storage.fill_(torch.nan)
    sequences, fresh, expected = [], [], []
    for seq_id, (past, new) in enumerate(shape):
        end = past + new
        table = [free.pop() for _ in range(-(-end // 16))]
        q = torch.randn(new, heads, head_dim, generator=generator).to(BF16)
        k, v = torch.randn(2, end, kv_heads, head_dim, generator=generator).to(BF16)
        for place in range(scores.reach.first(past) // 16 * 16, past):
            key, value = places(pool, layer, table[place // 16], place % 16)
            key.copy_(k[place].view(key.shape)), value.copy_(v[place])
        sequences.append(
            ScheduledSequence(
                seq_id, past, new, [0] * new, table, True, SamplingParams(), [0] * end, []
            )
        )
        fresh.append(torch.cat((q, k[past:], v[past:]), dim=1))
        expected.append(exact(q, k, v, scores))
    forward = ForwardBatch.build(
        ScheduledBatch(tuple(sequences)),
        block_size=16,
        vocab_size=16,
        device=CPU,
        previous=PreviousSample(torch.empty(0, dtype=torch.int64), {}),
    )
    # Strided views of one fused tensor, as the model hands them over.
    fused = torch.cat(fresh)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    backend.prepare(forward.metadata)
    out = torch.full((fused.shape[0], heads, head_dim), 7.0, dtype=BF16)
    backend.store(layer, k, v)
    backend.attend(layer, q, out)
    for sequence, row in zip(sequences, range(len(sequences)), strict=True):
        start = sum(new for _, new in shape[:row])
        for i, place in enumerate(range(sequence.start, sequence.end)):
            block, offset = sequence.block_table[place // 16], place % 16
            key, value = places(pool, layer, block, offset)
            assert torch.equal(key.reshape(kv_heads, head_dim), k[start + i])
            assert torch.equal(value, v[start + i])
    return out, torch.cat(expected)


@table("shape", SHAPES)
@table(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 16), (4, 2, 32), (7, 1, 64), (16, 8, 128), (3, 3, 48), (8, 1, 80), (2, 2, 256)],
)
def test_equals_the_formula(
    library: NativeKernels, shape: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    pool = new_pool(kv_heads, head_dim, heads)
    backend = NativeAttention(pool, library)
    out, expected = run_step(backend, pool, SHAPES[shape], heads, seed=heads)
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2e-2)


@table("shape", SHAPES)
@table("window", [1, 2, 15, 16, 17, 33, 64, 100])
def test_a_window_hides_what_is_before_it(library: NativeKernels, shape: str, window: int) -> None:
    scores = LayerScores(scale=0.3, reach=Reach(window=window))
    for heads, kv_heads in ((4, 2), (8, 1), (3, 3)):
        pool = new_pool(kv_heads, 32, heads)
        backend = NativeAttention(pool, library, (PLAIN, scores))
        out, expected = run_step(backend, pool, SHAPES[shape], heads, seed=window, scores=scores)
        torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2e-2)


def test_layers_that_the_kernels_do_not_compute_are_refused(library: NativeKernels) -> None:
    for scores in (LayerScores(softcap=30.0), LayerScores(reach=Reach(chunk=8))):
        with pytest.raises(ValueError, match="no soft caps"):
            NativeAttention(new_pool(2, 32, 4), library, (scores, PLAIN))


def test_other_layers_and_blocks_are_left_alone(library: NativeKernels) -> None:
    pool = new_pool(2, 32, 4)
    run_step(NativeAttention(pool, library), pool, SHAPES["mixed"], 4, layer=1)
    assert pool.keys[0].isnan().all()
    assert pool.values[0].isnan().all()
    num_places = sum(past + new for past, new in SHAPES["mixed"])
    assert (~pool.storage.isnan()).sum() == num_places * 2 * 2 * 32


def test_a_block_that_changes_hands_shows_nothing_of_its_past(library: NativeKernels) -> None:
    pool = new_pool(2, 32, 4)
    backend = NativeAttention(pool, library)
    first, expected = run_step(backend, pool, [(0, 40)], 4, seed=1)
    again, _ = run_step(backend, pool, [(0, 40)], 4, seed=1)
    assert torch.equal(first, again)
    torch.testing.assert_close(first.double(), expected, rtol=2**-6, atol=2e-2)


def test_a_negative_slot_is_not_stored(library: NativeKernels) -> None:
    pool = new_pool(2, 32, 4)
    k = torch.ones(3, 2, 32, dtype=BF16)
    slots = torch.tensor([-1, 17, -1], dtype=torch.int32)
    library.kv_store(
        k.data_ptr(),
        k.data_ptr(),
        64,
        64,
        pool.keys[0].data_ptr(),
        pool.values[0].data_ptr(),
        pool.storage.stride(0),
        slots.data_ptr(),
        3,
        2,
        32,
    )
    key, value = places(pool, 0, 1, 1)
    assert (key == 1).all()
    assert (value == 1).all()
    assert pool.storage.sum() == 2 * 2 * 32


def test_every_row_of_work_is_done_once() -> None:
    items = work_list((1, 5, 1), group=3).tolist()
    assert items == [[0, 0], [1, 0], [1, 8], [2, 0]]
    assert work_list((), group=2).shape == (0, 2)


def test_a_pool_of_another_kind_is_refused(library: NativeKernels) -> None:
    pool = new_pool(2, 32, 4)
    pool.block_size = 8
    with pytest.raises(ValueError, match="blocks of 16"):
        NativeAttention(pool, library)

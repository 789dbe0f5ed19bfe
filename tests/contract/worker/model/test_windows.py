"""A model whose layers all have a window gives blocks up as it is computed, and the tokens stay.

Blocks that no running sequence holds and that cannot be found again are NaN before each step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.messages import SamplingParams
from tests.support.cpu_kernels import kernels, variants
from tests.support.engine_run import generate
from tests.support.native_models import FAMILIES, MAX_LEN, new_model, new_pool
from tests.support.torch_device import torch_device
from tests.support.triton_device import NO_TRITON, has_triton
from worker.engine.batch import ScheduledBatch
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import DecoderStack
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.native_stack import NativeStack
from worker.model.kv_cache import KVCachePool, window_of
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.ops import TorchOps
from worker.model.step.runner import TorchModelRunner, TorchStepHandle

Way = tuple[CausalLM, DecoderStack, KVCachePool]
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SHARED = [7 + i for i in range(35)]
PROMPTS = [
    [*SHARED, *range(60, 100)],
    [3, 1, 4],
    [*SHARED, 99],
    [*SHARED, *range(150, 190)],
    list(range(100, 170)),
]
SHAPE = FAMILIES["mistral"]
WAYS = ["operators", *(f"kernels {name}" for name in variants())]
WAYS += [pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.timeout(400)])]
OPTIONS = {
    "small chunks": {"max_num_batched_tokens": 7},
    "small chunks, ahead": {"max_num_batched_tokens": 7, "lookahead": 1},
    "no prefix cache": {"prefix_caching": False, "lookahead": 1},
    "whole prompts": {"max_num_batched_tokens": 256},
}


def way_of(name: str) -> Way:
    if name == "triton":
        if not has_triton():
            pytest.skip(NO_TRITON)
        from worker.model.cuda.stack import CudaOps, CudaStack

        device = torch_device()
        shape = SHAPE | {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
        shape |= {"num_key_value_heads": 1, "hidden_size": 64, "intermediate_size": 64}
        model = new_model(shape, CudaOps(), device=device, dtype=torch.float32)
        pool = new_pool(model.config, device=device, dtype=torch.float32)
        return model, CudaStack(model, pool), pool
    if name == "operators":
        model = new_model(SHAPE, TorchOps(), dtype=torch.float32)
        pool = new_pool(model.config, dtype=torch.float32)
        return model, LayerByLayer(model, SdpaAttention(pool, model.config.layer_scores)), pool
    library = kernels(name.removeprefix("kernels "))
    model = new_model(SHAPE, NativeOps(library, is_int8=False))
    pool = new_pool(model.config)
    return model, NativeStack(model, pool, library), pool


class SpoilingRunner(TorchModelRunner):
    """Spoils what no sequence may read before each step."""

    engine: Engine
    pool: KVCachePool
    most_running = 0

    def launch(self, batch: ScheduledBatch) -> TorchStepHandle:
        blocks = self.engine._scheduler.blocks
        self.most_running = max(self.most_running, self.engine.stats().running)
        free = torch.tensor(blocks._free, dtype=torch.int64, device=self.pool.storage.device)
        self.pool.storage[free] = torch.nan
        return super().launch(batch)


def engine_of(way: Way, **options: object) -> Engine:
    model, stack, pool = way
    config = EngineConfig(
        num_blocks=pool.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=MAX_LEN,
        eos_token_ids=frozenset({2}),
    )
    config = replace(config, **options)
    runner = SpoilingRunner(model, stack, block_size=BLOCK_SIZE, max_num_seqs=4)
    engine = Engine(config, runner)
    runner.engine, runner.pool = engine, pool
    return engine


def tokens(engine: Engine, label: str = "r", **others: object) -> list[list[int]]:
    results = generate(engine, PROMPTS, GREEDY, label, **others)
    assert all(result.error is None for result in results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("name", WAYS)
def test_the_tokens_are_those_of_a_cache_that_keeps_all(name: str) -> None:
    way = way_of(name)
    window = window_of(way[0].config.kv_layers)
    assert window == SHAPE["sliding_window"]
    expected = tokens(engine_of(way))
    assert len({token for ids in expected for token in ids}) > 8
    some = {"chunks, ahead": {"max_num_batched_tokens": 24, "lookahead": 1}}
    for title, options in (some if name == "triton" else OPTIONS).items():
        engine = engine_of(way, windows=(window,), **options)
        assert tokens(engine) == expected, title
        assert tokens(engine, "again") == expected, title  # out of the prefix cache
        if engine.config.prefix_caching:
            assert engine.stats().prefix_hit_tokens > 2 * len(SHARED) // BLOCK_SIZE, title
        resumed = [ids[:9] for ids in expected]
        rest = tokens(engine_of(way, windows=(window,), **options), resumed=resumed)
        assert [[*a, *b] for a, b in zip(resumed, rest, strict=True)] == expected, title


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_small_cache_computes_longer_sequences_and_more_of_them(lookahead: int) -> None:
    way = way_of("operators")
    window = window_of(way[0].config.kv_layers)
    expected = tokens(engine_of(way))
    options: dict[str, object] = {"lookahead": lookahead, "max_num_batched_tokens": 8}
    assert engine_of(way, num_blocks=5, **options).config.sequence_capacity_tokens < MAX_LEN
    assert tokens(engine_of(way, num_blocks=5, windows=(window,), **options)) == expected

    def running(window: int | None) -> int:
        engine = engine_of(way, num_blocks=15, windows=(window,), prefix_caching=False, **options)
        assert tokens(engine) == expected
        return engine._runner.most_running  # type: ignore[attr-defined]

    assert running(None) < running(window) == 4


@pytest.mark.parametrize("lookahead", [0, 1])
def test_preempted_sequences_have_the_same_tokens(lookahead: int) -> None:
    way = way_of("operators")
    window = window_of(way[0].config.kv_layers)
    prompts = [[3, 1, 4], [1, 5, 9], [2, 6, 5], [3, 5, 8]]
    params = replace(GREEDY, max_tokens=80)
    expected = generate(engine_of(way), prompts, params)
    for num_blocks in range(4, 8):
        engine = engine_of(way, num_blocks=num_blocks, windows=(window,), lookahead=lookahead)
        assert generate(engine, prompts, params) == expected
        assert engine.stats().preemptions > 0

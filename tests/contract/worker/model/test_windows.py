"""Layers with a window give blocks up as a model is computed, and the tokens stay.

In some models all layers have one, others mix them.

Blocks that no running sequence holds and that cannot be found again are NaN before each step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from worker.model.cpu.native_stack import NativeAttention, NativeStack
from worker.model.kv_cache import KVCachePool, KVGroups
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
SHAPES = {"all": FAMILIES["mistral"], "mixed": FAMILIES["gemma3_text"]}
WAYS = ["operators", *(f"kernels {name}" for name in variants())]
WAYS += ["kernels layer by layer"]
WAYS += [pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.timeout(400)])]
OPTIONS = {
    "small chunks": {"max_num_batched_tokens": 7},
    "small chunks, ahead": {"max_num_batched_tokens": 7, "lookahead": 1},
    "no prefix cache": {"prefix_caching": False, "lookahead": 1},
    "whole prompts": {"max_num_batched_tokens": 256},
}


def groups_of(model: CausalLM) -> KVGroups:
    """Returns groups of one layer, where the layers are not alike."""
    layers = model.config.kv_layers
    if len({layer.window for layer in layers}) == 1:
        return KVGroups.single(layers)
    return KVGroups.of_size(layers, 1)


def way_of(name: str, kind: str = "all", *, in_groups: bool = True) -> Way:
    """Returns a model with a pool of its groups, or of one of all layers that keep all."""
    shape = SHAPES[kind]

    def pool_of(model: CausalLM, **others: Any) -> KVCachePool:
        return new_pool(model.config, groups=groups_of(model) if in_groups else None, **others)

    if name == "triton":
        if not has_triton():
            pytest.skip(NO_TRITON)
        from tests.support.step_graphs import new_capture, new_graphs
        from worker.model.cuda.stack import CudaOps, CudaStack

        device, num_layers = torch_device(), 2 if kind == "mixed" else 1
        shape = shape | {"num_hidden_layers": num_layers, "num_attention_heads": 2, "head_dim": 16}
        shape |= {"num_key_value_heads": 1, "hidden_size": 64, "intermediate_size": 64}
        shape |= {"sliding_window_pattern": 2}
        model = new_model(shape, CudaOps(), device=device, dtype=torch.float32)
        pool = pool_of(model, device=device, dtype=torch.float32)
        stack: DecoderStack = CudaStack(model, pool)
        if kind == "mixed":
            graphs = new_graphs(
                model,
                stack,
                max_num_seqs=4,
                max_num_tokens=32,
                max_blocks=-(-MAX_LEN // BLOCK_SIZE),
                num_kv_groups=len(pool.groups.windows),
            )
            graphs.capture_by(new_capture(), lambda share: None)
            stack = graphs
        return model, stack, pool
    if name == "operators":
        model = new_model(shape, TorchOps(), dtype=torch.float32)
        pool = pool_of(model, dtype=torch.float32)
        return model, LayerByLayer(model, SdpaAttention(pool, model.config.layer_scores)), pool
    is_whole = name != "kernels layer by layer"
    library = kernels(name.removeprefix("kernels ") if is_whole else next(iter(variants())))
    model = new_model(shape, NativeOps(library, quantization="none"))
    pool = pool_of(model)
    if is_whole:
        return model, NativeStack(model, pool, library), pool
    attention = NativeAttention(pool, library, model.config.layer_scores)
    return model, LayerByLayer(model, attention), pool


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
    runner = SpoilingRunner(
        model,
        stack,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        num_kv_groups=len(pool.groups.windows),
    )
    engine = Engine(config, runner)
    runner.engine, runner.pool = engine, pool
    return engine


def tokens(engine: Engine, label: str = "r", **others: object) -> list[list[int]]:
    results = generate(engine, PROMPTS, GREEDY, label, **others)
    assert all(result.error is None for result in results)
    return [result.token_ids for result in results]


def windowed(way: Way, **options: object) -> Engine:
    """An engine that gives up what the way's windows have left."""
    return engine_of(way, windows=way[2].groups.windows, **options)


def keeping(name: str, kind: str, **options: object) -> Engine:
    """An engine that keeps all tokens in all layers."""
    return engine_of(way_of(name, kind, in_groups=False), **options)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", WAYS)
def test_the_tokens_are_those_of_a_cache_that_keeps_all(name: str, kind: str) -> None:
    way = way_of(name, kind)
    windows = way[2].groups.windows
    assert windows[0] == (21 if kind == "all" else None)
    assert set(windows[1:]) == (set() if kind == "all" else {21})
    expected = tokens(keeping(name, kind))
    assert len({token for ids in expected for token in ids}) > 8
    some = {"chunks, ahead": {"max_num_batched_tokens": 24, "lookahead": 1}}
    for title, options in (some if name == "triton" else OPTIONS).items():
        engine = windowed(way, **options)
        assert tokens(engine) == expected, title
        assert tokens(engine, "again") == expected, title  # out of the prefix cache
        if engine.config.prefix_caching:
            assert engine.stats().prefix_hit_tokens > 2 * len(SHARED) // BLOCK_SIZE, title
        resumed = [ids[:9] for ids in expected]
        rest = tokens(windowed(way, **options), resumed=resumed)
        assert [[*a, *b] for a, b in zip(resumed, rest, strict=True)] == expected, title


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_small_cache_computes_longer_sequences_and_more_of_them(
    lookahead: int, kind: str
) -> None:
    way = way_of("operators", kind)
    expected = tokens(keeping("operators", kind))
    options: dict[str, object] = {"lookahead": lookahead, "max_num_batched_tokens": 8}
    num_groups = len(way[2].groups.windows)
    short = {"num_blocks": 5} | options
    assert keeping("operators", kind, **short).config.sequence_capacity_tokens < MAX_LEN
    assert tokens(windowed(way, **short | {"num_blocks": 5 * num_groups})) == expected

    def running(engine: Engine) -> int:
        assert tokens(engine) == expected
        return engine._runner.most_running  # type: ignore[attr-defined]

    many = {"prefix_caching": False} | options
    assert running(keeping("operators", kind, **many, num_blocks=15)) < 4
    assert running(windowed(way, **many, num_blocks=15 * num_groups)) == 4


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_preempted_sequences_have_the_same_tokens(lookahead: int, kind: str) -> None:
    way = way_of("operators", kind)
    num_groups = len(way[2].groups.windows)
    prompts = [[3, 1, 4], [1, 5, 9], [2, 6, 5], [3, 5, 8]]
    params = replace(GREEDY, max_tokens=80)
    expected = generate(keeping("operators", kind), prompts, params)
    for num_blocks in range(6 if kind == "mixed" else 4, 8):
        engine = windowed(way, num_blocks=num_blocks * num_groups, lookahead=lookahead)
        assert generate(engine, prompts, params) == expected
        assert engine.stats().preemptions > 0

"""Greedy output in float32 equals transformers' `generate`, however the engine cuts the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shared.messages import SamplingParams
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.engine_run import generate, new_engine
from tests.support.greedy_reference import NUM_TOKENS, GreedyReference, greedy_reference
from tests.support.torch_device import torch_device
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
UNLIMITED = 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS = {
    "llama3-scaling": ("llama", {"rope_scaling": LLAMA3}),
    "llama-v4-spelling-tied": (
        "llama",
        {"rope_scaling": LLAMA3, "config_style": "v4", "tie_word_embeddings": True},
    ),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1, "rope_theta": 500_000.0}),
    "qwen2-linear-scaling": ("qwen2", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2-tied-sharded": ("qwen2", {"tie_word_embeddings": True, "num_shards": 3}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN}),
    "qwen3-yarn-mscale": (
        "qwen3",
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "qwen3-tied-biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


@dataclass(frozen=True)
class Case:
    path: Path
    reference: GreedyReference

    def build(self, **options: object) -> BuiltModel:
        base = EngineOptions(
            checkpoint=str(self.path),
            device=torch_device().type,
            dtype="float32",
            num_kv_blocks=1024,
        )
        return build_model(replace(base, **options))  # type: ignore[arg-type]


def _case(path: Path) -> Case:
    return Case(path, greedy_reference(path, torch_device()))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _case(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param))


@pytest.mark.promise("Streaming: output depends neither on chunk size nor on the prefix cache")
@pytest.mark.promise("Engine: greedy, any prompt in chunks, streaming, cancel, stop strings")
@pytest.mark.parametrize(
    ("chunk", "block_size"), [(1, 4), (7, 4), (7, 16), (64, 16), (UNLIMITED, 4), (UNLIMITED, 16)]
)
def test_every_chunk_size_and_block_size(case: Case, chunk: int, block_size: int) -> None:
    built = case.build(max_num_batched_tokens=chunk, block_size=block_size)
    results = generate(new_engine(built), case.reference.prompts, GREEDY)
    assert [r.token_ids for r in results] == case.reference.outputs


@pytest.mark.parametrize(("block_size", "lookahead"), [(4, 0), (4, 1), (16, 1)])
def test_prefix_hits_change_nothing(case: Case, block_size: int, lookahead: int) -> None:
    built = case.build(block_size=block_size, max_num_batched_tokens=64, lookahead=lookahead)
    engine = new_engine(built)
    for label in ("cold", "warm"):
        results = generate(engine, case.reference.prompts, GREEDY, label)
        assert [r.token_ids for r in results] == case.reference.outputs
    assert engine.stats().prefix_hit_tokens >= 16 * 10


@pytest.mark.parametrize(("block_size", "chunk"), [(4, 7), (16, UNLIMITED)])
def test_without_prefix_cache(case: Case, block_size: int, chunk: int) -> None:
    built = case.build(block_size=block_size, max_num_batched_tokens=chunk, prefix_caching=False)
    engine = new_engine(built)
    for label in ("first", "second"):
        results = generate(engine, case.reference.prompts, GREEDY, label)
        assert [r.token_ids for r in results] == case.reference.outputs
    assert engine.stats().prefix_hit_tokens == 0


@pytest.mark.parametrize(
    ("chunk", "prefix_caching", "lookahead"),
    [(7, True, 0), (7, False, 1), (UNLIMITED, True, 1), (UNLIMITED, False, 0)],  # every pair
)
def test_a_pool_too_small_for_all_preempts_and_changes_nothing(
    case: Case, chunk: int, prefix_caching: bool, lookahead: int
) -> None:
    built = case.build(
        block_size=4,
        num_kv_blocks=20,
        max_num_batched_tokens=chunk,
        prefix_caching=prefix_caching,
        lookahead=lookahead,
    )
    engine = new_engine(built)
    results = generate(engine, case.reference.prompts, GREEDY)
    assert [r.token_ids for r in results] == case.reference.outputs
    if None in built.engine_config.windows:  # else no sequence outgrows what it was admitted with
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_logprobs_are_those_of_transformers(case: Case, lookahead: int) -> None:
    built = case.build(max_num_batched_tokens=64, lookahead=lookahead)
    results = generate(new_engine(built), case.reference.prompts, replace(GREEDY, logprobs=5))
    for result, output, expected in zip(
        results, case.reference.outputs, case.reference.logprobs, strict=True
    ):
        assert [entry.token_id for entry in result.logprobs] == output
        for entry, row in zip(result.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
            assert [value for _, value in entry.top] == pytest.approx(
                row.topk(5).values.tolist(), abs=1e-3
            )
            for token_id, value in entry.top:
                assert value == pytest.approx(row[token_id].item(), abs=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_a_family(name: str, tmp_path: Path) -> None:
    family, options = VARIANTS[name]
    case = _case(make_checkpoint(tmp_path, family, **options))  # type: ignore[arg-type]
    for chunk, block_size in ((7, 4), (UNLIMITED, 16)):
        built = case.build(max_num_batched_tokens=chunk, block_size=block_size)
        results = generate(new_engine(built), case.reference.prompts, GREEDY)
        assert [r.token_ids for r in results] == case.reference.outputs

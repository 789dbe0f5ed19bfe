"""Greedy output in float32 equals transformers' `generate`, for every model type of the list.

`make test` has those in SOME, `make test-models` all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from shared.messages import SamplingParams
from tests.support.engine_run import generate, new_engine
from tests.support.greedy_reference import NUM_TOKENS, GreedyReference, greedy_reference
from tests.support.tiny_models import TINY_MODELS, write_tiny_model
from tests.support.torch_device import torch_device
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model

# Windows, soft caps, sinks, experts, keys wider than values, partial and no rotation.
SOME = (
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "mistral",
    "mixtral",
    "phi3",
    "qwen3_moe",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
VARIETY = 25  # different tokens in all outputs together, so that a wrong one would show


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Without transformers' bars over the weights of each model."""
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@dataclass(frozen=True)
class Case:
    path: Path
    reference: GreedyReference

    def build(self, **options: object) -> BuiltModel:
        base = EngineOptions(
            checkpoint=str(self.path),
            model_impl="transformers",
            device=torch_device().type,
            dtype="float32",
            num_kv_blocks=256,
        )
        return build_model(replace(base, **options))  # type: ignore[arg-type]


@pytest.fixture(
    scope="module",
    params=[
        name if name in SOME else pytest.param(name, marks=pytest.mark.models)
        for name in TINY_MODELS
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = write_tiny_model(tmp_path_factory.mktemp("checkpoint"), request.param)
    reference = greedy_reference(path, torch_device(), attention="eager", min_gap=4e-4)
    assert len({token for output in reference.outputs for token in output}) >= VARIETY
    return Case(path, reference)


@pytest.mark.promise(
    "Transformers: greedy text equals transformers' `generate`, whatever the chunks, blocks, "
    "prefixes and preemptions (66 model types in float32, ten of them in `make test`; on CUDA not "
    "run)"
)
def test_in_small_chunks_with_prefixes_and_preemptions_it_says_the_same(case: Case) -> None:
    small = {"block_size": 4, "max_num_batched_tokens": 7, "lookahead": 1}
    built = case.build(num_kv_blocks=24, **small)
    if len(built.engine_config.windows) > 1:  # then these blocks are enough for all
        built = case.build(num_kv_blocks=14, **small)
    engine = new_engine(built)
    for label in ("cold", "warm"):
        results = generate(engine, case.reference.prompts, GREEDY, label)
        assert [r.token_ids for r in results] == case.reference.outputs
    stats = engine.stats()
    if None in built.engine_config.windows:  # else no sequence outgrows what it was admitted with
        assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


def test_whole_prompts_side_by_side_say_the_same(case: Case) -> None:
    built = case.build(block_size=16, max_num_batched_tokens=4096)
    results = generate(new_engine(built), case.reference.prompts, GREEDY)
    assert [r.token_ids for r in results] == case.reference.outputs

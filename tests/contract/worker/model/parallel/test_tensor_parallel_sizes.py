"""Ranks that are started for one model each: four of them, and for a model of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import new_engine
from tests.support.ranks import WAYS, assert_same, built, outputs, prompts
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(300)


def test_four_ranks_that_share_two_key_heads(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path,
        "qwen2",  # with biases
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=385,  # which no size divides
    )
    assert_equal_for(path, 4, {"cpu_tier": "packed"})


@pytest.mark.models
def test_a_model_of_transformers(tmp_path: Path) -> None:
    """`make test` has it over a rank that stands: test_tensor_parallel_models."""
    path = write_tiny_model(tmp_path, "qwen3_moe")
    assert_equal_for(path, 2, {"model_impl": "transformers", "structured_output": False})


def assert_equal_for(path: Path, size: int, options: dict[str, object]) -> None:
    asked, ways = prompts(6), WAYS[:4]
    with built(path, 1, **options) as model:
        expected = outputs(new_engine(model), asked, ways, "r")
        num_parameters = model.num_parameters
    with built(path, size, **options) as model:
        assert_same(outputs(new_engine(model), asked, ways, "r"), expected)
        assert model.num_parameters == num_parameters

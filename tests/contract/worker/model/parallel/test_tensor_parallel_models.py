"""What two and four ranks give for other families, tiers and models of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import new_engine
from tests.support.ranks import WAYS, assert_same, built, outputs, prompts
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("llama", 2, {"lookahead": 1}),  # the last token is known on the device alone
        ("gemma3_text", 2, {}),  # norms behind what ranks add up, scaled embeddings, windows
        ("qwen2", 4, {"cpu_tier": "packed"}),  # biases; two key heads, which ranks share
    ],
)
def test_other_families_sizes_and_tiers(
    family: str, size: int, options: dict[str, object], tmp_path: Path
) -> None:
    path = make_checkpoint(
        tmp_path,
        family,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=385,  # which no size divides
        attention_bias=family == "llama" or None,
    )
    assert_equal_for(path, size, options)


def test_a_model_of_transformers(tmp_path: Path) -> None:
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

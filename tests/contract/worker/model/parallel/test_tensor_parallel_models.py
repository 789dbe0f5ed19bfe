"""Two ranks give one rank's tokens, or refuse with a sentence: families, options, and every model
type of transformers' list.

`make test` has the types in SOME, `make test-models` all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import new_engine
from tests.support.ranks import GREEDY, SEEDED, WAYS, assert_same, built, outputs, prompts
from tests.support.ranks import engine_options as options_of
from tests.support.standing_ranks import StandingRank, standing_rank
from tests.support.tiny_models import TINY_MODELS, write_tiny_model
from worker.engines.transformers.sharding import COMPARED
from worker.model.build import choose_source
from worker.model.errors import UnsupportedModel

pytestmark = pytest.mark.timeout(300)

# Latent attention divided and not, windows and soft caps, fused products, biases, experts.
SOME = ("deepseek_v2", "deepseek_v3", "gemma2", "mixtral", "phi3", "qwen2", "qwen3_moe")
# Whose type transformers has no plan for. The sinks of gpt_oss are one for each head.
WITHOUT_A_PLAN = (
    "bitnet",
    "biogpt",
    "diffllama",
    "gpt2",
    "gpt_bigcode",
    "gpt_oss",
    "hunyuan_v1_dense",
    "modernbert-decoder",
    "opt",
    "persimmon",
    "stablelm",
)
TRANSFORMERS: dict[str, Any] = {
    "model_impl": "transformers",
    "structured_output": False,
    "max_num_batched_tokens": 48,
    "num_kv_blocks": 64,
}
BRIEF = (replace(GREEDY, max_tokens=8), replace(SEEDED, max_tokens=8))


@pytest.fixture(scope="module")
def rank() -> Iterator[StandingRank]:
    transformers_logging.disable_progress_bar()
    with standing_rank() as standing:
        yield standing
    transformers_logging.enable_progress_bar()


@pytest.mark.parametrize(
    ("family", "members", "options"),
    [
        # The last token is known on the device alone.
        ("llama", {"attention_bias": True}, {"lookahead": 1}),
        # Norms behind what ranks add up, scaled embeddings, windows.
        ("gemma3_text", {}, {}),
        # One key head, which the ranks share; the embedding is the output matrix.
        ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}, {}),
    ],
)
def test_native_families(
    rank: StandingRank,
    family: str,
    members: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 385}
    path = make_checkpoint(tmp_path, family, **{**shape, **members})
    assert_equal_for(rank, path, options)


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in SOME else pytest.param(name, marks=pytest.mark.models)
        for name in TINY_MODELS
        if name not in WITHOUT_A_PLAN
    ],
)
def test_model_types_of_transformers(rank: StandingRank, model_type: str, tmp_path: Path) -> None:
    assert_equal_for(rank, write_tiny_model(tmp_path, model_type), TRANSFORMERS)


def test_every_type_that_is_divided_is_compared() -> None:
    assert {*TINY_MODELS} - {*WITHOUT_A_PLAN} == COMPARED


@pytest.mark.parametrize(
    ("model_type", "members"),
    [
        # Sizes that two ranks do not divide: of the vocabulary, whose matrix is there once, and of
        # inner features in one product with the gates and in experts.
        ("gemma3_text", {"vocab_size": 301, "tie_word_embeddings": True}),
        ("phi3", {"intermediate_size": 97}),
        ("qwen3_moe", {"moe_intermediate_size": 33}),
    ],
)
def test_sizes_that_do_not_divide(
    rank: StandingRank, model_type: str, members: dict[str, Any], tmp_path: Path
) -> None:
    assert_equal_for(rank, write_tiny_model(tmp_path, model_type, **members), TRANSFORMERS)


@pytest.mark.parametrize(
    ("model_type", "members", "reason"),
    [
        ("gpt_oss", {}, "has no tensor parallel plan for model_type 'gpt_oss'"),
        ("qwen2", {"num_key_value_heads": 1}, "does not divide the heads of the model"),
        (
            "deepseek_v3",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "does not divide the heads of the model",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model_type: str, members: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = choose_source("transformers", write_tiny_model(tmp_path, model_type, **members))
    with pytest.raises(UnsupportedModel, match=f"{reason}.*; PENSTOCK_ENGINE=vllm may serve it"):
        source.check_divisible(2)


def test_a_type_that_was_not_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharding = "worker.engines.transformers.sharding"
    monkeypatch.setattr(f"{sharding}.COMPARED", COMPARED - {"qwen2"})
    source = choose_source("transformers", write_tiny_model(tmp_path, "qwen2"))
    with pytest.raises(
        UnsupportedModel, match=r"was not compared .* PENSTOCK_ENGINE=vllm may serve it"
    ):
        source.check_divisible(2)


def assert_equal_for(rank: StandingRank, path: Path, options: dict[str, Any]) -> None:
    is_brief = options is TRANSFORMERS
    asked, ways = prompts(4 if is_brief else 6), BRIEF if is_brief else WAYS[:4]
    with built(path, 1, **options) as model:
        expected = outputs(new_engine(model), asked, ways, "r")
        num_parameters = model.num_parameters
    assert len({token for output in expected for token in output.token_ids}) > 9, "no variety"
    with rank.built(options_of(path, 2, **options)) as model:
        assert_same(outputs(new_engine(model), asked, ways, "r"), expected)
        assert model.num_parameters == num_parameters

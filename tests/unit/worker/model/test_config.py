"""ModelConfig reads both spellings and refuses by name what it does not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import FAMILIES, make_checkpoint
from worker.model.config.layer_kinds import LayerKind
from worker.model.config.model_config import ModelConfig
from worker.model.config.rope import RopeConfig
from worker.model.errors import CheckpointError, UnsupportedModel

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def raw(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    } | changes


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_are_equal(family: str, tmp_path: Path) -> None:
    scaling = LLAMA3 | {"original_max_position_embeddings": 64}
    old, new = (
        ModelConfig.from_directory(
            make_checkpoint(
                tmp_path / style,
                family,
                config_style=style,
                rope_scaling=scaling,
                rope_theta=5e5,
                dtype="bfloat16",
            )
        )
        for style in ("v4", "v5")
    )
    assert old == new
    assert (old.dtype, old.rope.kind, old.rope.theta) == ("bfloat16", "llama3", 5e5)


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 7, {5, 6}),
        ({"eos_token_id": 5}, 7, {5}),
        ({}, 7, {7}),
        ({"eos_token_id": None}, [7, 8], {7, 8}),
        ({}, None, set()),
        ({"eos_token_id": 0}, 7, {0}),
    ],
)
def test_eos_comes_from_the_generation_config_first(
    generation: dict[str, Any], own: object, expected: set[int]
) -> None:
    assert ModelConfig.from_dict(raw(eos_token_id=own), generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["qwen3"]}, "model_type"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": "yes"}, "use_sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
            "sliding_window is null",
        ),
        (
            {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention",
        ),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1}}, "rope_parameters"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "slope": 1}}, "'slope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_parameters": "linear"}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_dict(raw() | changes)


WINDOW = 128  # tokens
SLIDES, ALL = LayerKind(WINDOW, is_local=True), LayerKind()


@pytest.mark.parametrize(
    ("family", "members", "layers"),
    [
        ("llama", {"sliding_window": WINDOW}, (ALL, ALL)),
        ("qwen2", {"sliding_window": WINDOW, "max_window_layers": 1}, (ALL, ALL)),
        ("qwen2", {"sliding_window": WINDOW, "max_window_layers": 1, "use_sliding_window": True},
         (ALL, SLIDES)),
        ("qwen3", {"sliding_window": WINDOW,
                   "layer_types": ["sliding_attention", "full_attention"]}, (SLIDES, ALL)),
        ("mistral", {"sliding_window": WINDOW}, (SLIDES, SLIDES)),
        ("mistral", {"sliding_window": None}, (ALL, ALL)),
        ("mistral", {}, (LayerKind(4096, is_local=True),) * 2),
        ("ministral", {"sliding_window": WINDOW}, (SLIDES, SLIDES)),
        ("ministral", {"sliding_window": WINDOW,
                       "layer_types": ["full_attention", "sliding_attention"]}, (ALL, SLIDES)),
        ("gemma3_text", {"sliding_window": WINDOW}, (SLIDES, SLIDES)),
        ("gemma3_text", {"sliding_window": WINDOW, "sliding_window_pattern": 2}, (SLIDES, ALL)),
        # A window that no sequence outgrows hides nothing; its layer still has its rotation.
        ("gemma3_text", {"sliding_window": WINDOW, "max_position_embeddings": 128},
         (LayerKind(None, is_local=True),) * 2),
    ],
)  # fmt: skip
def test_windows_are_those_of_the_family(
    family: str, members: dict[str, Any], layers: tuple[LayerKind, ...]
) -> None:
    config = ModelConfig.from_dict(raw(family) | members)
    assert config.layers == layers
    assert [scores.reach.window for scores in config.layer_scores] == [
        layer.window for layer in layers
    ]


def test_gemma_has_two_rotations_in_either_spelling() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 123.0, "rope_scaling": scaling}
    new = {
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
        }
    }
    for members in (old, new):
        config = ModelConfig.from_dict(raw("gemma3_text") | members)
        assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("linear", 5e5, 8.0)
        assert config.local_rope == RopeConfig(theta=123.0)
        assert config.context_length == 131_072, "its positions count the scaling already"
    assert config.attention_scale == 256**-0.5
    assert config.embedding_scale == 8.0


def test_qwen2_always_has_its_bias_and_never_on_the_output() -> None:
    config = ModelConfig.from_dict(raw("qwen2"))
    assert (config.attention_bias, config.output_bias) == (True, False)
    with pytest.raises(UnsupportedModel, match="attention_bias"):
        ModelConfig.from_dict(raw("qwen2", attention_bias=False))


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"layer_types": ["full_attention", "full_attention"]},
        {"quantization_config": None, "rope_scaling": None},
        {"some_future_member": 1},
    ],
)
def test_members_that_change_nothing_are_no_reason_to_refuse(harmless: dict[str, Any]) -> None:
    assert ModelConfig.from_dict(raw() | harmless) == ModelConfig.from_dict(raw())


def test_null_kv_heads_means_one_for_every_head() -> None:
    assert ModelConfig.from_dict(raw(num_key_value_heads=None)).num_kv_heads == 4


def test_scalings_extend_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = ModelConfig.from_dict(raw(max_position_embeddings=40_960, rope_scaling=yarn))
    assert config.context_length == 131_072
    linear = {"rope_type": "linear", "factor": 4.0}
    assert ModelConfig.from_dict(raw(rope_scaling=linear)).context_length == 131_072
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert ModelConfig.from_dict(raw(rope_scaling=dynamic)).context_length == 32_768
    assert ModelConfig.from_dict(raw(max_position_embeddings=40_960)).context_length == 40_960


@pytest.mark.parametrize("content", ["", "[]", '{"model_type": "qwen3"', "\ud800"])
def test_broken_files_are_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        ModelConfig.from_directory(tmp_path)
    make_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == {383}
    (tmp_path / "generation_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ModelConfig.from_directory(tmp_path)

"""Models of transformers that cannot be served are refused with a sentence, before their weights
are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint
from tests.support.tiny_models import write_tiny_model
from worker.engine_options import EngineOptions
from worker.engines.transformers import attention
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import LayerScores, Reach
from worker.model.build import build_model, choose_source
from worker.model.errors import CheckpointError, ModelError, UnsupportedModel
from worker.model.kv_cache import KVCachePool

WITHOUT_THE_INTERFACE: dict[str, dict[str, Any]] = {
    "bloom": {"seq_length": 64, "n_layer": 2, "n_head": 4, "hidden_size": 32},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32},
}
# Its rotation is as wide as head_dim, its keys as qk_rope_head_dim.
FAILING: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba2": ({}, "recurrent state"),
    "jamba": ({}, "recurrent state"),
    "qwen3_next": ({}, "recurrent state"),
    "lfm2": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        "layer_types conv .* keep a state",
    ),
    "t5": ({}, "has an encoder.*PENSTOCK_ENGINE=vllm may serve it"),
    "bart": ({}, "has an encoder.*PENSTOCK_ENGINE=vllm may serve it"),
    "bert": ({"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}, "not causal"),
    "vit": ({}, "no causal language model"),
    "falcon": ({"alibi": True}, "alibi"),
    "not_yet_written": ({}, "is unknown to transformers"),
}


def write_config(path: Path, model_type: str, **members: Any) -> Path:
    """A checkpoint without weights, so that reading them would fail."""
    config = {"model_type": model_type, "vocab_size": 300, **members}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.promise(
    "Transformers: a model that would be computed otherwise is refused with a sentence, by its "
    "configuration before its weights are read"
)
@pytest.mark.parametrize("model_type", WITHOUT_THE_INTERFACE)
def test_models_that_mask_for_themselves(model_type: str, tmp_path: Path) -> None:
    write_config(tmp_path, model_type, **WITHOUT_THE_INTERFACE[model_type])
    with pytest.raises(
        UnsupportedModel,
        match=f"{model_type}.*attention interface alone; PENSTOCK_ENGINE=vllm may serve it",
    ):
        choose_source("auto", tmp_path)


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_are_no_decoders_with_a_kv_cache(model_type: str, tmp_path: Path) -> None:
    members, sentence = REFUSED[model_type]
    write_config(tmp_path, model_type, **members)
    with pytest.raises(UnsupportedModel, match=sentence) as refused:
        choose_source("auto", tmp_path)
    assert model_type in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "model_type",
    ["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "mbart", "pegasus", "plbart"],
)
def test_decoders_that_count_positions_by_themselves(model_type: str, tmp_path: Path) -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4}
    write_config(tmp_path, model_type, is_encoder_decoder=False, is_decoder=True, **sizes)
    with pytest.raises(
        UnsupportedModel,
        match=f"{model_type}.*positions of a batch by itself.*PENSTOCK_ENGINE=vllm",
    ):
        choose_source("auto", tmp_path)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise SystemExit('it was run')")
    write_config(
        tmp_path, "own", auto_map={"AutoConfig": "model.C", "AutoModelForCausalLM": "model.M"}
    )
    with pytest.raises(UnsupportedModel, match=r"its own code \(auto_map\) is never run"):
        choose_source("auto", tmp_path)


def test_model_impl_native_uses_only_native_families(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "olmo2")
    with pytest.raises(UnsupportedModel, match="'olmo2' is not supported; known are"):
        choose_source("native", tmp_path)
    assert choose_source("auto", tmp_path).name == "transformers"


def test_native_comes_first(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert choose_source("auto", tmp_path).name == "native"
    assert choose_source("transformers", tmp_path).name == "transformers"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, "olmo2")


def build(path: Path, **options: Any) -> None:
    build_model(EngineOptions(checkpoint=str(path), device="cpu", num_kv_blocks=64, **options))


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    stored = load_file(file) | tensors
    save_file({k: v for k, v in stored.items() if v is not None}, file, {"format": "pt"})


NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (None, f"tensor '{NORM}' is missing"),
        (torch.ones(7), f"tensor '{NORM}' has another shape"),
    ],
)
def test_tensors_that_do_not_fit(checkpoint: Path, tensor: Any, sentence: str) -> None:
    change(checkpoint, **{NORM: tensor})
    with pytest.raises(CheckpointError, match=sentence):
        build(checkpoint)


def test_a_tensor_that_nothing_computes_with(checkpoint: Path) -> None:
    change(checkpoint, **{"model.layers.0.self_attn.extra": torch.ones(3)})
    with pytest.raises(CheckpointError, match="extra' is not used by the model"):
        build(checkpoint)


def test_a_checkpoint_without_safetensors(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        build(checkpoint)


def test_a_broken_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="cannot be loaded by transformers"):
        build(checkpoint)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}},
    ],
    ids=lambda value: value["quant_method"],
)
def test_quantized_checkpoints_name_what_is_missing(
    checkpoint: Path, quantization: dict[str, Any]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = quantization
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModel, match=r"quantization_config: .*PENSTOCK_ENGINE=vllm may serve it"
    ):
        build(checkpoint)


def test_a_kv_cache_in_fp8_is_for_native_families(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="kv_cache_dtype 'fp8' is for native model families"):
        build(checkpoint, kv_cache_dtype="fp8")


def test_longrope_is_served_within_its_first_length(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
    }
    write_tiny_model(tmp_path, "phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    assert choose_source("auto", tmp_path).config.context_length == 64
    with pytest.raises(ModelError, match="max_model_len 65 exceeds the model"):
        build(tmp_path, max_model_len=65)


def test_llama4s_temperature_is_served_where_it_is_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama4_text", floor_scale=32, attn_temperature_tuning=True)
    assert choose_source("auto", tmp_path).config.context_length == 31


def test_a_model_whose_own_forward_pass_fails_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "glm4_moe_lite", **FAILING)
    with pytest.raises(
        UnsupportedModel,
        match=r"'glm4_moe_lite' fails in its own forward pass \(RuntimeError: .*_ENGINE=vllm",
    ) as refused:
        build(tmp_path, load_format="dummy")
    assert "\n" not in str(refused.value)


def without(part: str, layers: Sequence[LayerScores]) -> list[LayerScores]:
    if part == "window":
        return [replace(layer, reach=Reach()) for layer in layers]
    return [replace(layer, softcap=None) for layer in layers]


@pytest.mark.parametrize(
    ("model_type", "part"), [("mistral", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks")]
)
def test_an_attention_that_leaves_something_out_is_found_at_load(
    model_type: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Incomplete(SdpaAttention):
        def __init__(self, pool: KVCachePool, layers: Sequence[LayerScores]) -> None:
            super().__init__(pool, layers if part == "sinks" else without(part, layers))

        def attend(self, *arguments: Any) -> None:
            super().attend(*arguments[: 3 if part == "sinks" else 4])

    monkeypatch.setattr(attention, "SdpaAttention", Incomplete)
    write_tiny_model(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=r"over a paged KV cache.*logits are off by"):
        build(tmp_path, model_impl="transformers", dtype="float32")

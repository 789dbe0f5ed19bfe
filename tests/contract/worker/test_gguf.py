"""GGUF files are served like the safetensors checkpoints that they dequantize to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.messages import SamplingParams
from shared.text.checkpoint_text import load_tokenizer, load_tokenizer_and_eos, read_checkpoint_text
from tests.support.checkpoints import CHATML_TEMPLATE, IM_END, make_checkpoint
from tests.support.gguf_files import LLAMA3, write_gguf
from worker.checkpoint import CheckpointNotFound, find_checkpoint
from worker.llm import LLM
from worker.model.config.gguf_header import TYPES
from worker.model.config.model_config import ModelConfig
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement, RankGroup
from worker.model.weights import reader as weight_reader
from worker.model.weights.loader import Checkpoint

CPU = torch.device("cpu")
PROMPTS = ["The keeper counts to 60 \U0001f600\n", "<|im_start|>user\nHi  there<|im_end|>\n", "a"]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
GEMMA_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA = {"num_hidden_layers": 6, "layer_types": GEMMA_LAYERS, "query_pre_attn_scalar": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights_of(directory: Path, rank: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
    """What a rank's model in float32 has of the checkpoint, by name."""
    config = ModelConfig.from_directory(directory)
    model = CausalLM(config, 32, Placement(CPU, torch.float32, RankGroup(rank, size)))
    Checkpoint(directory, config).load(model)
    return {name: place.data for name, place in model.named_tensors() if place.data is not None}


def check_weights(directory: Path, dequantized: Path, **part: int) -> None:
    found, expected = weights_of(directory, **part), weights_of(dequantized, **part)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-7), name


def outputs(model: Path) -> list[tuple[int, ...]]:
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=128)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return [result.token_ids for result in llm.generate(PROMPTS, params, progress=False)]


@pytest.mark.parametrize("type_name", [name for name, _, _ in TYPES.values()])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_of_each_type_are_those_that_the_package_dequantizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, type_name: str
) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 20_000)  # several pieces of each matrix
    checkpoint = make_checkpoint(tmp_path / "made", family, **WIDE, head_dim=32)
    dequantized = write_gguf(checkpoint, tmp_path / "m.gguf", type_name)
    found = find_checkpoint(str(tmp_path / "m.gguf"), "")
    assert found.name == "m"
    check_weights(found.path, dequantized)
    check_weights(found.path, dequantized, rank=1, size=2)


@pytest.mark.parametrize(
    ("family", "members"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500_000.0}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        (
            "qwen3",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        ("gemma3_text", {**GEMMA, "tie_word_embeddings": True}),
    ],
)
def test_an_architecture_has_the_configuration_and_the_greedy_text_of_its_checkpoint(
    tmp_path: Path, family: str, members: dict[str, Any]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", family, **members)
    dequantized = write_gguf(checkpoint, tmp_path / "m.gguf", "Q8_0")
    path = find_checkpoint(str(tmp_path / "m.gguf"), "").path
    found, expected = ModelConfig.from_directory(path), ModelConfig.from_directory(dequantized)
    assert found.dtype == "bfloat16"
    ends = expected.eos_token_ids | found.eos_token_ids
    assert found.eos_token_ids == ends, "all that end a sequence in the checkpoint do"
    assert replace(found, dtype=expected.dtype) == replace(expected, eos_token_ids=ends)
    check_weights(path, dequantized)
    assert outputs(tmp_path / "m.gguf") == outputs(dequantized)


def test_the_text_side_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "qwen3")
    write_gguf(checkpoint, tmp_path / "m.gguf")
    path = find_checkpoint(str(tmp_path / "m.gguf"), "").path
    (found, ends), expected = load_tokenizer_and_eos(path), load_tokenizer(checkpoint)
    for text in PROMPTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text), skip_special_tokens=False) == text
    assert found.token_id(IM_END) == ends[0]
    assert found.special_ids == expected.special_ids
    text_files = read_checkpoint_text(path)
    assert text_files.chat_templates == {"default": CHATML_TEMPLATE}
    assert text_files.special_tokens["eos_token"] == IM_END


def test_shards_are_one_model_whichever_is_named_and_a_missing_one_is_named(
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "llama")
    dequantized = write_gguf(checkpoint, tmp_path / "m.gguf", split_max_tensors=9)
    shards = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(shards) == 3
    found = find_checkpoint(str(shards[1]), "")
    assert found.name == "m"
    check_weights(found.path, dequantized)
    for shard in shards:
        shard.rename(tmp_path / "made" / shard.name)
    (tmp_path / "made" / "model.safetensors").unlink()
    (tmp_path / "made" / "mmproj-m.gguf").touch()
    assert find_checkpoint(str(tmp_path / "made"), "").name == "made"
    (tmp_path / "made" / shards[2].name).unlink()
    with pytest.raises(CheckpointNotFound, match=rf"{shards[2].name} is missing: .* of 3 files"):
        find_checkpoint(str(tmp_path / "made"), "")


def test_a_directory_of_several_models_is_refused_with_their_names(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "llama")
    for type_name in ("Q8_0", "F16"):
        write_gguf(checkpoint, tmp_path / f"m-{type_name}.gguf", type_name)
    with pytest.raises(CheckpointNotFound, match=r"2 models, m-F16\.gguf, m-Q8_0\.gguf: give one"):
        find_checkpoint(str(tmp_path), "")


def test_text_files_are_made_once_for_each_state_of_the_file(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "llama")
    write_gguf(checkpoint, tmp_path / "m.gguf")
    first = find_checkpoint(str(tmp_path / "m.gguf"), "").path
    made = (first / "config.json").stat().st_mtime_ns
    assert find_checkpoint(str(tmp_path / "m.gguf"), "").path == first
    assert (first / "config.json").stat().st_mtime_ns == made
    (tmp_path / "m-dequantized").rename(tmp_path / "before")
    write_gguf(checkpoint, tmp_path / "m.gguf", "Q8_0")
    other = find_checkpoint(str(tmp_path / "m.gguf"), "").path
    assert other != first
    assert json.loads((other / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_file_that_names_no_pre_tokenizer_gets_the_default_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "llama")
    write_gguf(checkpoint, tmp_path / "m.gguf", tokenizer_pre=None)
    find_checkpoint(str(tmp_path / "m.gguf"), "")
    assert "m.gguf names no pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("family", "further", "sentence"),
    [
        ("qwen3", {"general.architecture": "rwkv6"}, r"m\.gguf: architecture 'rwkv6' is not read"),
        ("llama", {"llama.expert_count": 8}, r"m\.gguf: llama\.expert_count is 8"),
        ("llama", {"llama.attention.value_length": 8}, "value_length is 8, and a head has 16"),
        ("llama", {"llama.rope.scaling.type": "su"}, "rope.scaling.type 'su' is not supported"),
        ("llama", {"llama.block_count": "two"}, "llama.block_count must be a whole number"),
        ("llama", {"tokenizer.ggml.pre": "acme"}, "tokenizer.ggml.pre 'acme' is not known; known"),
        ("llama", {"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
    ],
)
def test_what_is_not_known_is_refused_by_the_name_of_file_and_key(
    tmp_path: Path, family: str, further: dict[str, Any], sentence: str
) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", family)
    write_gguf(checkpoint, tmp_path / "m.gguf", further=further)
    with pytest.raises(CheckpointNotFound, match=sentence):
        find_checkpoint(str(tmp_path / "m.gguf"), "")

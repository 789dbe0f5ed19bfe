"""Weights land where they belong, or the error names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint
from tests.support.torch_device import torch_device
from worker.model.config.model_config import ModelConfig
from worker.model.errors import CheckpointError, UnsupportedModel
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement
from worker.model.weights.loader import Checkpoint, fill_with_noise

NORM = "model.layers.1.input_layernorm.weight"


def empty_model(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return CausalLM(ModelConfig.from_directory(path), 32, Placement(torch_device(), dtype))


def load_weights(
    model: CausalLM, path: Path, report: Callable[[float], None] | None = None
) -> None:
    Checkpoint(path, model.config).load(model, report)


def edited(path: Path, **changes: torch.Tensor | None) -> Path:
    """The checkpoint with tensors replaced, added (a tensor) or taken away (None)."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)
    return path


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_every_tensor_is_in_its_place(family: str, stored: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family, dtype=stored)
    model = empty_model(path)
    seen: list[float] = []
    load_weights(model, path, seen.append)
    on_disk = load_file(path / "model.safetensors")
    places = dict(model.named_tensors())
    assert places.keys() == on_disk.keys()
    for name, tensor in on_disk.items():
        assert torch.equal(places[name].data.cpu(), tensor.float()), name
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert model.num_parameters == sum(tensor.numel() for tensor in on_disk.values())


def test_shards_and_one_file_give_the_same_model(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one", "qwen2")
    many = make_checkpoint(tmp_path / "many", "qwen2", num_shards=4)
    models = [empty_model(one), empty_model(many)]
    for model, path in zip(models, (one, many), strict=True):
        load_weights(model, path)
    for (name, a), (_, b) in zip(models[0].named_tensors(), models[1].named_tensors(), strict=True):
        assert torch.equal(a.data, b.data), name


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = edited(make_checkpoint(tmp_path / "missing"), **{NORM: None})
    with pytest.raises(CheckpointError, match=f"'{NORM}' is missing"):
        load_weights(empty_model(path), path)
    path = edited(make_checkpoint(tmp_path / "unexpected"), extra=torch.zeros(2))
    with pytest.raises(CheckpointError, match="unexpected tensor 'extra'"):
        load_weights(empty_model(path), path)
    path = edited(make_checkpoint(tmp_path / "shape"), **{NORM: torch.zeros(3)})
    with pytest.raises(CheckpointError, match=rf"'{NORM}' has shape \[3\], .* \[64\]"):
        load_weights(empty_model(path), path)
    path = edited(make_checkpoint(tmp_path / "dtype"), **{NORM: torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=NORM):
        load_weights(empty_model(path), path)


def test_derived_and_tied_tensors_are_passed_over(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, tie_word_embeddings=True)
    edited(
        path,
        **{
            "lm_head.weight": torch.zeros(384, 64),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
        },
    )
    load_weights(empty_model(path), path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "cut")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_weights(empty_model(path), path)
    file.unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        load_weights(empty_model(path), path)


def safetensors(entries: object, size: int = 8) -> bytes:
    """A file with that header, and so many bytes of numbers."""
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (b"abc", "a header of .* bytes in a file of 3"),
        ((1 << 62).to_bytes(8, "little"), "a header of 4611686018427387904 bytes"),
        ((4).to_bytes(8, "little") + b"{{{{", "cannot be read as safetensors"),
        (safetensors([]), "cannot be read as safetensors"),
        (safetensors({"a": {**ENTRY, "dtype": "BF16"}}), r"'a' of shape \[2\] has 8 bytes"),
        (safetensors({"a": {**ENTRY, "data_offsets": [-8, 0]}}), "'a' has offsets -8 to 0"),
        (safetensors({"a": {"dtype": "F32"}}), "cannot be read as safetensors: 'shape'"),
        (safetensors({"a": ENTRY}, 7), "is cut off: it has .* bytes and should have"),
        (safetensors({"a": ENTRY}, 9), "has more bytes than its header declares"),
    ],
)
def test_what_is_no_safetensors_file_is_named(content: bytes, named: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{named}"):
        load_weights(empty_model(path), path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_shards=2)
    first, second = sorted(path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=f"{second.name}: repeated tensor"):
        load_weights(empty_model(path), path)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "../model.safetensors"}, "not a safetensors file of this directory"),
        ({"a": "model.bin"}, "not a safetensors file"),
        ({"a": "model-9.safetensors"}, "is missing"),
        ({}, "weight_map"),
        (None, "weight_map"),
    ],
)
def test_a_bad_index_is_refused(weight_map: object, named: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_shards=2)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({} if weight_map is None else {"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=named):
        load_weights(empty_model(path), path)


def test_dummy_weights_are_the_same_for_a_seed(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    first, second, other = (empty_model(path) for _ in range(3))
    fill_with_noise(first, 1)
    fill_with_noise(second, 1)
    fill_with_noise(other, 2)
    heads = [dict(one.named_tensors())["lm_head.weight"].data for one in (first, second, other)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert all(torch.isfinite(place.data).all() for _, place in first.named_tensors())

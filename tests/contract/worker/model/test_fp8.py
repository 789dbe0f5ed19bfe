"""FP8 checkpoints: their greedy text is that of the weights which they stand for.

Where they are widened as they are loaded, that is exact: the twin has the same numbers, which were
dequantized by hand in float32. Where they stay in FP8, inputs are rounded to e4m3 as well.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.messages import SamplingParams
from tests.support.engine_run import generate, new_engine
from tests.support.native_models import model_in_fp8, new_pool, run_step
from tests.support.quantised_checkpoints import (
    BLOCK,
    FORMATS,
    FP8,
    FP8_FORMATS,
    is_projection,
    make_quantised,
)
from worker.engine_options import EngineOptions
from worker.model.attention.sdpa import SdpaAttention
from worker.model.build import build_model
from worker.model.config.model_config import ModelConfig
from worker.model.errors import CheckpointError, ModelError, UnsupportedModel
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.fp8 import Fp8Layout, Fp8Method
from worker.model.parallel.group import Placement, RankGroup
from worker.model.weights.loader import Checkpoint, fill_with_noise, noise_layouts

CPU = torch.device("cpu")
PROMPTS = [np.random.default_rng(n).integers(3, 300, n).tolist() for n in (3, 21, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def outputs(path: Path, **options: Any) -> list[list[int]]:
    given: dict[str, Any] = {
        "checkpoint": str(path),
        "model_impl": "native",
        "device": "cpu",
        "dtype": "float32",
        "num_kv_blocks": 64,
    }
    built = build_model(EngineOptions(**given | options))
    return [result.token_ids for result in generate(new_engine(built), PROMPTS, GREEDY)]


@pytest.mark.promise(
    "vLLM: quantized checkpoints give the text of their full weights, or are refused by a sentence "
    "(on CPUs)"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FP8_FORMATS)
def test_on_the_cpu_it_says_what_its_twin_says(name: str, dtype: str, tmp_path: Path) -> None:
    quantised, twin = make_quantised(tmp_path, FP8_FORMATS[name])
    expected = outputs(twin, dtype=dtype)
    assert len({token for output in expected for token in output}) > 15
    assert outputs(quantised, dtype=dtype) == expected


def of_layer_1(name: str) -> bool:
    return is_projection(name) and ".layers.0." not in name


def but_keys(name: str) -> bool:
    return is_projection(name) and "k_proj" not in name and "up_proj" not in name


def with_head(name: str) -> bool:
    return is_projection(name) or name == "lm_head.weight"


@pytest.mark.parametrize("is_quantised", [of_layer_1, but_keys, with_head])
@pytest.mark.parametrize("name", ["fp8-rows", "fp8-blocks"])
def test_what_is_left_out_of_it_is_computed_as_it_is(
    name: str, is_quantised: Callable[[str], bool], tmp_path: Path
) -> None:
    quantised, twin = make_quantised(tmp_path, FP8_FORMATS[name], "qwen2", is_quantised)
    assert outputs(quantised) == outputs(twin)


def test_an_int8_model_equals_its_twin_in_int8(tmp_path: Path) -> None:
    quantised, twin = make_quantised(tmp_path, FP8_FORMATS["fp8-blocks"])
    assert outputs(quantised, quantization="int8") == outputs(twin, quantization="int8")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["fp8-static", "fp8-rows", "fp8-blocks"])
def test_a_rank_has_its_part_of_what_the_weights_stand_for(
    name: str, size: int, tmp_path: Path
) -> None:
    """Shares cut blocks: 64 rows of a head, 64 columns of the feed-forward."""
    quantised, twin = make_quantised(tmp_path, FP8_FORMATS[name])
    for rank in range(size):
        parts = []
        for path in (quantised, twin):
            config = ModelConfig.from_directory(path)
            placement = Placement(CPU, torch.float32, RankGroup(rank, size))
            model = CausalLM(config, 32, placement)
            Checkpoint(path, config).load(model)
            parts.append({name: place.data for name, place in model.named_tensors()})
        for tensor_name, expected in parts[1].items():
            assert torch.equal(parts[0][tensor_name], expected), (rank, tensor_name)


def stood_for(data: Tensor, scales: Tensor) -> Tensor:
    if scales.dim() == 1:
        return data.float() * scales[:, None]
    return data.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_weights_that_stay_in_fp8_have_their_scales(name: str, tmp_path: Path) -> None:
    quantised, twin = make_quantised(tmp_path, FP8_FORMATS[name])
    meant = load_file(twin / "model.safetensors")
    num_kept = 0
    for tensor_name, place in model_in_fp8(quantised).named_tensors():
        if not is_projection(tensor_name) or name == "fp8-weights":
            assert place.scales is None
            assert torch.equal(place.data, meant[tensor_name]), tensor_name
            continue
        assert place.data.dtype == FP8
        assert torch.equal(stood_for(place.data, place.scales), meant[tensor_name]), tensor_name
        is_static = name in ("fp8-static", "fp8-mistral")
        assert place.input_scale == torch.tensor([0.05]) if is_static else not place.input_scale
        num_kept += 1
    assert num_kept == (0 if name == "fp8-weights" else 7 * 2)


def test_a_fused_weight_of_two_kinds_and_cut_blocks_do_not_stay_in_fp8(tmp_path: Path) -> None:
    format = FP8_FORMATS["fp8-blocks"]
    quantised, twin = make_quantised(tmp_path, format, is_quantised=but_keys)
    meant = load_file(twin / "model.safetensors")
    for name, place in model_in_fp8(quantised).named_tensors():
        is_kept = "o_proj" in name or "down_proj" in name
        assert (place.scales is not None) == is_kept, name
        if not is_kept:
            assert torch.equal(place.data, meant[name]), name
    (tmp_path / "cut").mkdir()
    quantised, _ = make_quantised(tmp_path / "cut", format)
    in_fp8 = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, place in model_in_fp8(quantised, group=RankGroup(1, 2)).named_tensors()
        if place.scales is not None
    }
    # Two ranks have 128 of the inner features and query rows each, and 64 of the key rows.
    assert in_fp8 == {"gate_proj", "up_proj", "down_proj", "o_proj"}


@pytest.mark.parametrize("name", ["fp8", "fp8-static", "fp8-rows", "fp8-blocks"])
def test_products_over_fp8_differ_from_the_twins_by_the_rounding_of_inputs(
    name: str, tmp_path: Path
) -> None:
    quantised, twin = make_quantised(tmp_path, FP8_FORMATS[name])
    config = ModelConfig.from_directory(twin)
    plain = CausalLM(config, 96, Placement(CPU, torch.float32))
    Checkpoint(twin, config).load(plain)
    found = []
    for model in (plain, model_in_fp8(quantised)):
        pool = new_pool(config, dtype=torch.float32)
        model.finish()
        stack = LayerByLayer(model, SdpaAttention(pool, config.layer_scores))
        found.append(run_step(stack, [(0, 1), (0, 21)]))
    error = (found[1] - found[0]).norm() / found[0].norm()
    # e4m3 rounds by 2.6 % on average (uniform in +-1/16 of a power of two); two layers add up.
    assert 1e-3 < error < 0.12


def test_dummy_weights_are_in_fp8_where_the_checkpoints_would_be(tmp_path: Path) -> None:
    quantised, _ = make_quantised(tmp_path, FP8_FORMATS["fp8-blocks"])
    config = ModelConfig.from_directory(quantised)
    layouts = noise_layouts(config)
    assert layouts == Checkpoint(quantised, config).fp8_layouts
    assert set(layouts.values()) == {Fp8Layout(in_blocks=True)}
    assert noise_layouts(replace(config, fp8=None)) == {}
    stored = {name: Fp8Method(layout) for name, layout in layouts.items()}
    model = CausalLM(config, 32, Placement(CPU, torch.float32), stored=stored)
    fill_with_noise(model)
    for name, place in model.named_tensors():
        if name in layouts:
            size = stood_for(place.data, place.scales).std() * place.columns.whole**0.5
            assert 0.9 < size < 1.1, "as large as weights that are not in FP8"
    assert outputs(quantised, load_format="dummy")


def changed(path: Path, **tensors: Tensor | None) -> Path:
    """The checkpoint with tensors of layer 1's q_proj replaced, added, or taken away (None)."""
    file = path / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for suffix, tensor in tensors.items():
        name = f"model.layers.1.self_attn.q_proj.{suffix}"
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, file, {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("tensors", "error", "sentence"),
    [
        ({"weight_scale": None}, CheckpointError, "q_proj.weight' has no weight_scale"),
        ({"weight_scale": torch.ones(3, 1)}, CheckpointError, r"have shape \[3, 1\]"),
        ({"weight_scale": torch.ones(256, 2)}, CheckpointError, r"have shape \[256, 2\]"),
        ({"weight_scale": torch.ones(256, dtype=torch.int32)}, UnsupportedModel, "stored as I32"),
        (
            {"weight": torch.ones(256, 128)},
            CheckpointError,
            "has a scale, but is not",
        ),
        (
            {"weight": torch.ones(256, 128).to(torch.float8_e5m2)},
            CheckpointError,
            "not stored in FP8",
        ),
        ({"zero_point": torch.ones(256)}, CheckpointError, "unexpected tensor .*zero_point"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tensors: dict[str, Tensor | None], error: type[ModelError], sentence: str, tmp_path: Path
) -> None:
    quantised, _ = make_quantised(tmp_path, FP8_FORMATS["fp8-rows"])
    with pytest.raises(error, match=sentence):
        outputs(changed(quantised, **tensors))


def test_a_config_and_files_that_disagree_are_refused(tmp_path: Path) -> None:
    quantised, twin = make_quantised(tmp_path, FORMATS["fp8"])
    config = json.loads((quantised / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="but the checkpoint holds none"):
        outputs(twin)
    del config["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"F8_E4M3, but config\.json has no"):
        outputs(quantised)


def test_scales_of_keys_and_values_change_nothing_and_far_ones_are_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A KV cache in FP8 has a scale of 1."""
    quantised, twin = make_quantised(tmp_path, FP8_FORMATS["fp8-rows"])
    file = quantised / "model.safetensors"
    plain = load_file(file)

    def warnings(k_scale: float, **options: str) -> list[str]:
        names = {one: f"model.layers.0.self_attn.{one}_scale" for one in "kv"}
        added = {names["k"]: torch.tensor([k_scale]), names["v"]: torch.tensor([0.3])}
        save_file(plain | added, file, {"format": "pt"})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert outputs(quantised, **options) == outputs(twin, **options)
        return [one.getMessage() for one in caplog.records if "kv_cache_dtype" in one.message]

    assert warnings(2.5) == []
    assert warnings(0.0004) == []
    assert warnings(1.0, kv_cache_dtype="fp8") == []
    (told,) = warnings(0.0004, kv_cache_dtype="fp8")
    assert "model.layers.0.self_attn.k_scale is 0.0004: most of them are too small" in told
    (told,) = warnings(2.5, kv_cache_dtype="fp8")
    assert "model.layers.0.self_attn.k_scale is 2.5: those beyond 448 saturate" in told

"""Quantized formats that are served, and the sentences for those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.quantised_checkpoints import FORMATS, FP8_FORMATS
from worker.model.config.quantization import Fp8Format, fp8_format
from worker.model.errors import UnsupportedModel


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_what_makers_write_is_understood(name: str) -> None:
    found = fp8_format({"quantization_config": FP8_FORMATS[name].config})
    block = (128, 128) if "block" in name else None
    assert found == Fp8Format(block, quantizes_inputs=FP8_FORMATS[name].quantises_activations)
    assert fp8_format({"compression_config": FP8_FORMATS[name].config}) == found


def test_without_the_member_nothing_is_quantized() -> None:
    assert fp8_format({}) is None
    assert fp8_format({"quantization_config": None}) is None


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - FP8_FORMATS.keys()))
def test_other_formats_are_refused_with_what_is_served(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"^quantization_config: .*; FP8 .* are served$"):
        fp8_format({"quantization_config": FORMATS[name].config})


def changed(name: str, *path: str, **members: Any) -> dict[str, Any]:
    """That format's config with members of the object at `path` replaced."""
    config = dict(FP8_FORMATS[name].config)
    inner = config
    for step in path:
        inner[step] = dict(inner[step])
        inner = inner[step]
    inner.update(members)
    return config


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")
INPUTS = (*GROUP, "input_activations")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("fp8", "must be an object"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method 'fbgemm_fp8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({}, None),
        (changed("fp8", fmt="e5m2"), "fmt 'e5m2'"),
        (changed("fp8", activation_scheme="sometimes"), "activation_scheme 'sometimes'"),
        (changed("fp8-blocks", activation_scheme="static"), "'static' with weight_block_size"),
        (changed("fp8-blocks", scale_fmt="ue8m0"), "scale_fmt 'ue8m0'"),
        (changed("fp8-blocks", weight_block_size=[128]), "weight_block_size must be two"),
        (changed("fp8-blocks", weight_block_size=[128, 0]), "weight_block_size must be two"),
        (changed("fp8-rows", format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (changed("fp8-rows", format="mixed-precision"), "format 'mixed-precision'"),
        (changed("fp8-rows", sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (changed("fp8-rows", transform_config={"R1": {}}), "transform_config"),
        (changed("fp8-rows", config_groups={}), "config_groups must be"),
        (changed("fp8-rows", *GROUP, format="int-quantized"), "group_0: format 'int-quantized'"),
        (changed("fp8-rows", *GROUP, weights=None), "weights must be an object"),
        (changed("fp8-rows", *GROUP, output_activations={"num_bits": 8}), "output_activations"),
        (changed("fp8-rows", *WEIGHTS, type="int"), "weights: type 'int' of 8 bits"),
        (changed("fp8-rows", *WEIGHTS, num_bits=4), "weights: type 'float' of 4 bits"),
        (changed("fp8-rows", *WEIGHTS, strategy="group"), "strategy 'group'"),
        (changed("fp8-rows", *WEIGHTS, symmetric=False), "symmetric False"),
        (changed("fp8-rows", *INPUTS, type="int"), "input_activations: type 'int' of 8 bits"),
        (changed("fp8-rows", *INPUTS, strategy="channel"), "strategy 'channel'"),
        (changed("fp8-static", *INPUTS, dynamic="local"), "dynamic 'local'"),
        (changed("fp8-block", *INPUTS, dynamic=False), "static scales with blocks"),
        (changed("fp8-block", *INPUTS, group_size=64), "group_size 64"),
        (changed("fp8-block", *WEIGHTS, block_structure=None), "block_structure must be"),
    ],
)
def test_what_is_not_served_is_named(config: Any, named: str | None) -> None:
    if named is None:
        assert fp8_format({"quantization_config": config}) is None
        return
    with pytest.raises(UnsupportedModel, match=named):
        fp8_format({"quantization_config": config})

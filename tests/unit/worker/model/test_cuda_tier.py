"""What CUDA devices are asked for in FP8, by what they say of themselves: none is here."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")


from worker.engine_options import EngineOptions
from worker.model.build import build_model
from worker.model.config.model_config import ModelConfig
from worker.model.config.quantization import Fp8Format
from worker.model.cuda import fp8, toolchain
from worker.model.cuda.invariant import InvariantOps
from worker.model.cuda.tier import keeps_fp8, tier_of
from worker.model.errors import ModelError
from worker.model.native import NativeSource
from worker.model.parallel.group import Placement
from worker.model.tier import TierRequest
from worker.settings import DEMO_CHECKPOINT

ADA, HOPPER, AMPERE = (8, 9), (9, 0), (8, 0)


def device_of(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(fp8, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(toolchain, "unavailable_reason", lambda device: None)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("capability", [ADA, HOPPER])
def test_weights_stay_in_fp8_where_the_device_multiplies_by_them(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement(device_of(capability, monkeypatch), torch.bfloat16)
    assert keeps_fp8(EngineOptions(checkpoint="."), placement)
    assert not keeps_fp8(EngineOptions(checkpoint=".", attention_backend="sdpa"), placement)


@pytest.mark.parametrize(
    ("capability", "dtype", "wrong", "said"),
    [
        (AMPERE, torch.bfloat16, None, "a card has less than compute capability 8.9"),
        (HOPPER, torch.float16, None, "products of FP8 give bfloat16, the model is torch.float16"),
        (HOPPER, torch.bfloat16, "products are off by 3.00%", "off by 3.00%"),
    ],
)
def test_why_weights_do_not_stay_in_fp8_is_logged(
    capability: tuple[int, int],
    dtype: torch.dtype,
    wrong: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    placement = Placement(device_of(capability, monkeypatch), dtype)
    monkeypatch.setattr(fp8, "unavailable_reason", lambda device: wrong)
    with caplog.at_level(logging.WARNING):
        assert not keeps_fp8(EngineOptions(checkpoint="."), placement)
    assert said in caplog.text
    named = EngineOptions(checkpoint=".", quantization="fp8")
    with pytest.raises(ModelError, match=f"quantization 'fp8' is unavailable: .*{re.escape(said)}"):
        keeps_fp8(named, placement)


def test_fp8_that_is_asked_for_by_name_needs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(device_of(HOPPER, monkeypatch), torch.bfloat16)
    stored = replace(ModelConfig.from_directory(DEMO_CHECKPOINT), fp8=Fp8Format())
    request = TierRequest(config=stored, dtype=torch.bfloat16, block_size=32, quantization="fp8")
    options = EngineOptions(checkpoint=".", quantization="fp8")
    assert tier_of(options, request, placement, 128).fp8_method is not None
    with pytest.raises(ModelError, match="unavailable: with attention_backend 'sdpa'"):
        tier_of(replace(options, attention_backend="sdpa"), request, placement, 128)
    monkeypatch.setattr(toolchain, "unavailable_reason", lambda device: "no C compiler")
    with pytest.raises(ModelError, match="unavailable: no C compiler"):
        tier_of(options, request, placement, 128)
    any_way = replace(request, quantization="none")
    assert tier_of(EngineOptions(checkpoint="."), any_way, placement, 128).name == "reference"


def test_fp8_by_name_is_refused_for_other_models_and_devices() -> None:
    options = EngineOptions(checkpoint=str(DEMO_CHECKPOINT), quantization="fp8", device="cpu")
    with pytest.raises(ModelError, match="is for native model families on CUDA"):
        build_model(options)
    source = NativeSource(DEMO_CHECKPOINT)
    placement = Placement(torch.device("cuda", 0), torch.bfloat16)
    with pytest.raises(ModelError, match="no weights that are multiplied in FP8"):
        source.load(options, placement, 128, 32, lambda *_: None)


def test_batch_invariance_is_that_of_this_projects_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = EngineOptions(checkpoint=".", batch_invariant=True)
    request = TierRequest(config=None, dtype=torch.bfloat16, block_size=32)
    placement = Placement(device_of(HOPPER, monkeypatch), torch.bfloat16)
    assert isinstance(tier_of(options, request, placement, 128).ops, InvariantOps)
    assert not keeps_fp8(options, placement)
    assert "products of FP8 depend on the number of rows" in caplog.text
    by_torch = replace(options, attention_backend="sdpa")
    with pytest.raises(ModelError, match="PENSTOCK_BATCH_INVARIANT needs this project's Triton"):
        tier_of(by_torch, request, placement, 128)


def test_a_kv_cache_in_fp8_needs_a_device_whose_kernels_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = EngineOptions(checkpoint=".", kv_cache_dtype="fp8")
    request = TierRequest(config=None, dtype=torch.bfloat16, block_size=32)
    placement = Placement(device_of(AMPERE, monkeypatch), torch.bfloat16)
    with pytest.raises(ModelError, match=r"needs compute capability 8\.9 .* a card has 8\.0"):
        tier_of(options, request, placement, 128)
    placement = Placement(device_of(ADA, monkeypatch), torch.bfloat16)
    assert tier_of(options, request, placement, 128).name == "triton"

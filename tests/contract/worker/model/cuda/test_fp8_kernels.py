"""FP8 products on CUDA against their twins in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.native_models import model_in_fp8, new_pool, run_step
from tests.support.quantised_checkpoints import FP8_FORMATS, make_quantised
from tests.support.torch_device import torch_device
from tests.support.triton_device import NO_TRITON, has_triton

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import FP8, Activation, Share
from worker.model.cuda import fp8 as kernels
from worker.model.cuda.fp8 import CudaFp8Method
from worker.model.cuda.layers import (
    Rounded,
    Rounding,
    add_norm,
    add_norm_rounded,
    gate,
    gate_rounded,
)
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.layers import fp8 as twins
from worker.model.layers.decoder import LayerByLayer
from worker.model.layers.fp8 import BLOCK, LARGEST, Fp8Layout, Fp8Method, Fp8Weight, Fp8Weights
from worker.model.layers.linear_method import LinearShape
from worker.model.layers.ops import Norm

pytestmark = pytest.mark.triton


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch_device())


def weight_of(size_in: int, size_out: int, kind: str) -> Fp8Weight:
    """Scales differ by a factor of up to three: a wrong one shows."""
    shape = (size_out // BLOCK, size_in // BLOCK) if kind == "blocks" else (size_out,)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(5)) + 0.5
    input_scale = torch.tensor([0.02], device=torch_device()) if kind == "static" else None
    values = numbers(size_out, size_in, seed=4).to(FP8)
    return Fp8Weight(values, (scales * 0.1).to(torch_device()), input_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "group"), [(96, 96), (1536, 1536), (384, BLOCK), (2048, BLOCK)])
@pytest.mark.parametrize("scale", [None, 0.01])
def test_rows_are_rounded_as_by_the_twin(
    dtype: torch.dtype, size: int, group: int, scale: float | None
) -> None:
    x = numbers(5, size).to(dtype)
    x[1] = 0
    x[2, : size // 2] *= 100  # beyond the given scale, and far from the other half
    given = None if scale is None else torch.tensor([scale], device=x.device)
    values, scales = kernels.quantize_rows(x, group, given)
    expected, expected_scales = twins.quantize_rows(x, group, given)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    same = values.view(torch.uint8) == expected.view(torch.uint8)
    assert same.float().mean() > 0.999, "a GPU's division may turn a tie"
    torch.testing.assert_close(values.float(), expected.float(), rtol=0.13, atol=2**-9)
    if scale is not None:
        assert values.float().abs().max() == LARGEST


ROUNDINGS = pytest.mark.parametrize(
    ("size", "group", "scale"),
    [(96, 96, None), (1536, 1536, 0.01), (384, BLOCK, None), (2304, BLOCK, None)],
)


def rounding_of(group: int, scale: float | None) -> Rounding:
    return Rounding(group, None if scale is None else torch.tensor([scale], device=torch_device()))


def same_bits(seen: Rounded, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Asserts that both are the same numbers; NaN is one."""
    for left, right in zip((seen.values, seen.scales), expected, strict=True):
        raw = torch.uint8 if left.dtype == FP8 else torch.int32
        assert left.view(raw).equal(right.view(raw))


@ROUNDINGS
@pytest.mark.parametrize("has_delta", [False, True])
@np.errstate(invalid="ignore")
def test_a_norm_rounds_as_a_launch_of_its_own_does(
    size: int, group: int, scale: float | None, has_delta: bool
) -> None:
    norm = Norm(numbers(size, seed=2).bfloat16(), 1e-6, adds_one=True)
    delta = numbers(5, size, seed=1).bfloat16() if has_delta else None
    delta_norm = norm if has_delta else None
    rounding = rounding_of(group, scale)
    x = numbers(5, size).bfloat16()
    x[1] = 0
    x[2, : size // 2] *= 100
    x[3, 7] = torch.inf
    expected_x, normed = add_norm(x.clone(), delta, norm, delta_norm)
    seen_x, seen = add_norm_rounded(x.clone(), delta, norm, delta_norm, rounding)
    assert seen_x.view(torch.int16).equal(expected_x.view(torch.int16))
    same_bits(seen, kernels.quantize_rows(normed, group, rounding.scale))
    assert seen.dtype == torch.bfloat16


@ROUNDINGS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@np.errstate(invalid="ignore")
def test_a_gate_rounds_as_a_launch_of_its_own_does(
    size: int, group: int, scale: float | None, activation: Activation
) -> None:
    rounding = rounding_of(group, scale)
    both = numbers(5, 2 * size, scale=3).bfloat16()
    both[1] = 0
    both[2, : size // 2] *= 100
    both[3, size - 1] = torch.inf
    seen = gate_rounded(both, activation, rounding)
    same_bits(seen, kernels.quantize_rows(gate(both, activation), group, rounding.scale))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@np.errstate(invalid="ignore")  # the interpreter computes with numpy, which warns
def test_what_is_not_finite_shows_in_its_row_alone(bad: float) -> None:
    x = numbers(3, 256)
    x[1, 200] = bad
    for kind in ("rows", "static", "blocks"):
        weight = weight_of(256, 128, kind)
        for quantize in (kernels.quantize_rows, twins.quantize_rows):
            out = twins.multiply(*quantize(x, weight.group, weight.input_scale), weight, None)
            assert not out[1].isfinite().any(), kind
            assert out[[0, 2]].isfinite().all(), kind


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 70, 129])
@pytest.mark.parametrize(("size_in", "size_out"), [(128, 256), (640, 384)])
def test_products_in_blocks_equal_the_twin(rows: int, size_in: int, size_out: int) -> None:
    weight, bias = weight_of(size_in, size_out, "blocks"), numbers(size_out, seed=3)
    rounded = twins.quantize_rows(numbers(rows, size_in), BLOCK)
    for added in (None, bias):
        expected = twins.multiply(*rounded, weight, added)
        seen = kernels.multiply_in_blocks(*rounded, weight, added, torch.float32)
        # The same products of whole numbers; sums of 128 are float32 here, less on a GPU.
        torch.testing.assert_close(seen, expected, rtol=2e-3, atol=2e-3 * expected.std().item())


@pytest.mark.parametrize("kind", ["rows", "static", "blocks"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_linear_layers_equal_the_twins(kind: str, activation: Activation) -> None:
    weight = weight_of(256, 256, kind)
    bias = numbers(256, seed=3).bfloat16()
    x = numbers(7, 256).bfloat16()
    layout = Fp8Layout(weight.in_blocks)
    for gated_by in (None, activation):
        sizes = [Share.all_of(256)] if gated_by is None else [Share.all_of(128)] * 2
        shape = LinearShape(
            in_features=Share.all_of(256),
            parts=dict(zip("ab", sizes, strict=False)),
            has_bias=True,
            adds_bias=True,
            activation=gated_by,
        )
        weights = Fp8Weights(weight, bias)
        seen = CudaFp8Method(layout).product(shape, weights)(x)
        expected = Fp8Method(layout).product(shape, weights)(x)
        assert seen.dtype == torch.bfloat16
        error = (seen.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.02, "a few roundings to bfloat16"


def test_products_of_rows_let_the_matrix_units_sum_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    product = functional.scaled_mm

    def scaled_mm(*args: Any, **options: Any) -> torch.Tensor:
        given.append(options)
        return product(*args, **options)

    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    kernels.Fp8Product(weight_of(32, 32, "rows"), None)(numbers(3, 32).bfloat16())
    assert [options["use_fast_accum"] for options in given] == [True]


@pytest.mark.parametrize("name", ["fp8-static", "fp8-rows", "fp8-blocks"])
def test_a_stack_over_fp8_weights_equals_torchs_operators(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rounding to bfloat16 moves an input to the next number of e4m3, here or there, and this
    # model amplifies that. On CUDA there are no such products in float32.
    device = torch_device()
    dtype, tolerance = (torch.bfloat16, 0.25) if device.type == "cuda" else (torch.float32, 0.05)
    path, _ = make_quantised(tmp_path, FP8_FORMATS[name])
    twin = model_in_fp8(path, device=device, dtype=dtype)
    model = model_in_fp8(path, device=device, dtype=dtype, ops=CudaOps(), method=CudaFp8Method)
    twin.finish()
    model.finish()
    pools = [new_pool(model.config, device=device, dtype=dtype) for _ in range(2)]
    by_layers = LayerByLayer(twin, SdpaAttention(pools[0], model.config.layer_scores))
    stack = CudaStack(model, pools[1])
    num_alone: list[int] = []
    quantize = kernels.quantize_rows

    def counted(*arguments: Any) -> Any:
        num_alone.append(1)
        return quantize(*arguments)

    monkeypatch.setattr(kernels, "quantize_rows", counted)
    expected, seen = (
        run_step(one, [(5, 1), (16, 1), (0, 30)], device=device).float()
        for one in (by_layers, stack)
    )
    assert (seen - expected).norm() < tolerance * expected.norm()
    # The output of attention; norms and gates round what they compute.
    assert len(num_alone) == model.config.num_layers


def test_the_check_before_loading_tells_wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.unavailable_reason(torch_device()) is None
    right = kernels.quantize_rows
    monkeypatch.setattr(
        kernels, "quantize_rows", lambda x, group, scale: right(x * 1.1, group, scale)
    )
    assert "off by" in str(kernels.unavailable_reason(torch_device()))

    def missing(*arguments: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(kernels, "quantize_rows", missing)
    assert kernels.unavailable_reason(torch_device()) == "RuntimeError: no such operator"

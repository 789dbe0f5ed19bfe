"""Products of four-bit weights beside their specification, over odd sizes, in every tier."""

from __future__ import annotations

import pytest
import torch

from tests.support.cpu_kernels import kernels, variants
from tests.support.table import table
from worker.model.base import Activation
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.onednn_ops import OneDnnInt4Ops
from worker.model.layers.int4 import Int4Ops, quantize_weight
from worker.model.layers.int8 import quantize_rows, spread
from worker.model.layers.linear_method import activated

BF16 = torch.bfloat16
# Tiles hold at most 2 or 12 rows, from 16 on they are written straight to their place.
ROWS = (1, 2, 3, 7, 11, 12, 13, 15, 16, 17, 25, 37, 64)
SHAPES = ((64, 48), (32, 1), (96, 33), (192, 640), (1024, 31), (256, 64))  # in, out


@pytest.fixture(params=variants())
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(kernels(request.param), quantization="int4")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(BF16)


def exact(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """[rows, out] float64, of numbers, factors and offsets as they are kept."""
    kept = quantize_weight(weight)
    numbers = kept.numbers.double().view(len(weight), -1, 32)
    wide = numbers * kept.factors.double()[:, :, None] - kept.offsets.double()[:, :, None]
    wide = wide.view(weight.shape) * kept.scales.double()[:, None]
    values, scales = quantize_rows(x)
    result = (values.double() - 128) * scales.double() @ wide.T
    return result if bias is None else result + bias.double()


@table("with_bias", [False, True])
@table(("size_in", "size_out"), SHAPES)
def test_products(ops: NativeOps, size_in: int, size_out: int, with_bias: bool) -> None:
    weight = random(size_out, size_in, seed=1, scale=size_in**-0.5)
    bias = random(size_out, seed=2) if with_bias else None
    multiply = ops.linear(weight, bias)
    for rows in ROWS:
        x = random(rows, size_in, seed=rows)
        found, expected = multiply(x).double(), exact(weight, bias, x)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)


@table("activation", ["silu", "gelu_tanh"])
@table("inner", [16, 40, 7, 96])
def test_gated_products(ops: NativeOps, inner: int, activation: Activation) -> None:
    weight, bias = random(2 * inner, 64, seed=1, scale=0.2), random(2 * inner, seed=2)
    multiply = ops.gated_linear(weight, bias, activation)
    for rows in ROWS:
        x = random(rows, 64, seed=rows)
        found = multiply(x)
        assert found.shape == (rows, inner)
        expected = activated(lambda rows: exact(weight, bias, rows), activation)(x)
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_slower_tiers_compute_the_same(dtype: torch.dtype) -> None:
    weight, bias, x = random(48, 96, scale=0.1), random(48, seed=1), random(5, 96, seed=2)
    expected = exact(weight, bias, x)
    for slower in (Int4Ops(), OneDnnInt4Ops()):
        found = slower.linear(weight.to(dtype), bias.to(dtype))(x.to(dtype))
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-2)


def test_sums_of_extremes_do_not_saturate(ops: NativeOps) -> None:
    weight = torch.full((32, 256), 3.0, dtype=BF16)
    weight[1::2] *= -1
    x = torch.full((2, 256), 5.0, dtype=BF16)
    x[1] *= -1
    out = ops.linear(weight, None)(x)
    torch.testing.assert_close(out.double(), exact(weight, None, x), rtol=2**-7, atol=1e-2)


def test_numbers_factors_and_offsets_stay_within_their_bits() -> None:
    odd = random(6, 96, scale=0.1)
    odd[0], odd[1], odd[2] = 0, 4, -4
    odd[3, 5], odd[4, :32], odd[5, ::2] = 300, 0, 50
    for weight in (odd, random(200, 512, seed=3), spread(odd).to(BF16)):
        kept = quantize_weight(weight)
        assert kept.numbers.max() <= 15
        assert kept.factors.min() >= 1
        assert kept.factors.max() <= 15
        assert kept.offsets.max() <= 127
        assert (15 * kept.factors.int() - kept.offsets.int()).max() <= 127
        back = kept.widened().values * kept.scales[:, None]
        wide = spread(weight)
        # 15 steps span a group; the largest of a row bounds a whole number's.
        step = kept.factors.float().repeat_interleave(32, dim=1) * kept.scales[:, None]
        assert ((back - wide).abs() <= 2.1 * step).all()
        assert (back - wide).norm() <= 0.12 * wide.norm()


def test_an_input_size_without_whole_groups_is_int8(ops: NativeOps) -> None:
    weight, x = random(40, 48, scale=0.2), random(3, 48, seed=1)
    in_int8 = NativeOps(ops._kernels, quantization="int8").linear(weight, None)(x)
    assert torch.equal(ops.linear(weight, None)(x), in_int8)
    for slower in (Int4Ops(), OneDnnInt4Ops()):
        torch.testing.assert_close(slower.linear(weight, None)(x), in_int8, rtol=2**-6, atol=1e-2)


@table("size", [64, 192])
def test_less_is_lost_where_it_is_known_how_large_inputs_are(ops: NativeOps, size: int) -> None:
    weight, x = random(48, size, scale=size**-0.5), random(64, size, seed=3)
    x[:, [5, size // 2 + 1]] *= 20
    exact_result = x.float() @ weight.float().T
    sizes = x.float().square().mean(dim=0).sqrt()
    for one in (ops, OneDnnInt4Ops(), Int4Ops()):
        without, knowing = (
            (each.linear(weight, None)(x).float() - exact_result).norm()
            for each in (one, one.for_inputs(sizes))
        )
        assert knowing < 0.8 * without

"""Every kernel of the native tier against its torch twin, over odd sizes and ragged shapes."""

from __future__ import annotations

import pytest
import torch

from tests.support.cpu_kernels import kernels, variants
from tests.support.table import table
from worker.model.base import Activation
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.onednn_ops import OneDnnInt8Ops, PackedOps
from worker.model.layers.int8 import Int8Ops, quantize_rows, quantize_weight, spread
from worker.model.layers.ops import HeadNorm, Norm, Ops, TorchOps

BF16 = torch.bfloat16
EPS = 1e-6
# Tiles hold at most 12 rows, panels 32 columns: around those sizes, and far from them.
ROWS = (1, 2, 3, 7, 8, 11, 12, 13, 16, 24, 25, 37, 64)
SHAPES = ((64, 48), (16, 1), (48, 33), (192, 640), (1024, 31), (256, 64))  # in, out
FEW_ROWS = (1, 5, 12, 29)


@pytest.fixture(params=variants())
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(kernels(request.param), quantization="none")


@pytest.fixture(params=variants())
def int8_ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(kernels(request.param), quantization="int8")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(BF16)


def exact(ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> object:
    """The twin's answer in float32: what is left is the kernel's own rounding."""
    wide_bias = bias.float() if bias is not None else None
    return ops.linear(weight.float(), wide_bias)(x.float())


def test_this_machine_can_run_the_kernels() -> None:
    assert variants(), "tests of the native tier need AVX2"


ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


@table("with_bias", [False, True])
@table(("size_in", "size_out"), SHAPES)
def test_products(ops: NativeOps, size_in: int, size_out: int, with_bias: bool) -> None:
    weight = random(size_out, size_in, seed=1, scale=size_in**-0.5)
    bias = random(size_out, seed=2) if with_bias else None
    multiply = ops.linear(weight, bias)
    for rows in ROWS:
        x = random(rows, size_in, seed=rows)
        expected = exact(TorchOps(), weight, bias, x)
        torch.testing.assert_close(multiply(x).float(), expected, rtol=2**-7, atol=1e-2)


@table("activation", ACTIVATIONS)
@table("with_bias", [False, True])
@table("inner", [16, 40, 7, 96, 176])
def test_gated_products(
    ops: NativeOps, inner: int, with_bias: bool, activation: Activation
) -> None:
    weight = random(2 * inner, 64, seed=1, scale=0.2)
    bias = random(2 * inner, seed=2) if with_bias else None
    multiply = ops.gated_linear(weight, bias, activation)
    wide_bias = bias.float() if bias is not None else None
    twin = TorchOps().gated_linear(weight.float(), wide_bias, activation)
    for rows in ROWS:
        x = random(rows, 64, seed=rows)
        out = multiply(x)
        assert out.shape == (rows, inner)
        torch.testing.assert_close(out.float(), twin(x.float()), rtol=2**-7, atol=2e-2)


@table("activation", ACTIVATIONS)
def test_gates_of_large_numbers_do_not_overflow(ops: NativeOps, activation: Activation) -> None:
    weight = torch.eye(32, dtype=BF16)
    x = torch.zeros(1, 32, dtype=BF16)
    x[0, :4] = torch.tensor([300.0, -300.0, 89.0, -89.0])
    x[0, 16:] = 2.0
    out = ops.gated_linear(weight, None, activation)(x)
    expected = TorchOps().gated_linear(weight, None, activation)(x)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-2)


@table("with_bias", [False, True])
@table(("size_in", "size_out"), SHAPES)
def test_int8_products(int8_ops: NativeOps, size_in: int, size_out: int, with_bias: bool) -> None:
    weight = random(size_out, size_in, seed=1, scale=size_in**-0.5)
    bias = random(size_out, seed=2) if with_bias else None
    multiply = int8_ops.linear(weight, bias)
    for rows in ROWS:
        x = random(rows, size_in, seed=rows)
        expected = exact(Int8Ops(), weight, bias, x)
        torch.testing.assert_close(multiply(x).float(), expected, rtol=2**-7, atol=1e-2)


@table("activation", ACTIVATIONS)
def test_int8_gated_products(int8_ops: NativeOps, activation: Activation) -> None:
    weight, bias = random(2 * 40, 64, seed=1, scale=0.2), random(2 * 40, seed=2)
    multiply = int8_ops.gated_linear(weight, bias, activation)
    twin = Int8Ops().gated_linear(weight.float(), bias.float(), activation)
    for rows in FEW_ROWS:
        x = random(rows, 64, seed=rows)
        torch.testing.assert_close(multiply(x).float(), twin(x.float()), rtol=2**-7, atol=2e-2)


def test_int8_sums_of_extremes_do_not_saturate(int8_ops: NativeOps) -> None:
    weight = torch.full((32, 256), 3.0, dtype=BF16)
    weight[1::2] *= -1
    x = torch.full((2, 256), 5.0, dtype=BF16)
    x[1] *= -1
    out = int8_ops.linear(weight, None)(x)
    torch.testing.assert_close(out.float(), x.float() @ weight.float().T, rtol=2**-7, atol=0)


def test_oddities_of_int8_rows_stay_in_their_row(int8_ops: NativeOps) -> None:
    multiply = int8_ops.linear(random(48, 64, scale=0.1), None)
    x = random(4, 64, seed=5)
    x[1] = 0
    x[2, 7] = torch.nan
    x[3, 3] = torch.inf
    out = multiply(x)
    assert torch.equal(out[1], torch.zeros(48, dtype=BF16))
    assert out[2].isnan().all()
    assert not out[3].isfinite().any()
    assert torch.equal(out[:1], multiply(x[:1].clone()))


def test_a_nan_comes_out_of_a_product_as_a_nan(ops: NativeOps) -> None:
    multiply = ops.linear(random(48, 64), None)
    x = random(3, 64)
    x[1, 5] = torch.nan
    out = multiply(x)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()


@table("size", [16, 64, 176, 576])
@table("rows", [1, 7, 8, 33])
def test_add_and_norm(ops: NativeOps, rows: int, size: int) -> None:
    x, delta = random(rows, size), random(rows, size, seed=1)
    for adds_one in (False, True):
        norm, delta_norm = (Norm(random(size, seed=seed), EPS, adds_one) for seed in (2, 3))
        for added in (None, delta):
            expected_x, expected = TorchOps().add_norm(x, added, norm)
            summed, normed = ops.add_norm(x.clone(), added, norm)
            assert torch.equal(summed, expected_x)
            torch.testing.assert_close(normed, expected, rtol=2**-6, atol=1e-3)
        expected_x, expected = TorchOps().add_norm(x, delta, norm, delta_norm)
        summed, normed = ops.add_norm(x.clone(), delta, norm, delta_norm)
        # A step of bfloat16 at 4 is 2**-6, and what is left of a difference may be as small.
        torch.testing.assert_close(summed, expected_x, rtol=2**-6, atol=2**-5)
        torch.testing.assert_close(normed, expected, rtol=2**-5, atol=2**-4)


@table(("with_norm", "adds_one"), [(False, False), (True, False), (True, True)])
@table("head_dim", [16, 32, 48, 64, 128, 256])
@table(("heads", "kv_heads"), [(4, 2), (7, 1), (3, 3)])
def test_rotation(
    ops: NativeOps, heads: int, kv_heads: int, head_dim: int, with_norm: bool, adds_one: bool
) -> None:
    norm = None
    if with_norm:
        norm = HeadNorm(*(Norm(random(head_dim, seed=seed), EPS, adds_one) for seed in (3, 4)))
    for tokens in (1, 9):
        qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, seed=tokens)
        angles = torch.rand(tokens, 1, head_dim // 2, generator=torch.Generator().manual_seed(1))
        cos, sin = (angles * 6).cos().to(BF16), (angles * 6).sin().to(BF16)
        expected = TorchOps().rotate(qkv, heads, kv_heads, norm, cos, sin)
        found = ops.rotate(qkv.clone(), heads, kv_heads, norm, cos, sin)
        for ours, twin in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, twin, rtol=2**-5, atol=3e-2)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_packed_products_are_those_of_torch(dtype: torch.dtype) -> None:
    weight, bias = random(96, 64).to(dtype), random(96, seed=1).to(dtype)
    for rows in FEW_ROWS:
        x = random(rows, 64, seed=rows).to(dtype)
        for name in ("linear", "gated_linear"):
            expected = getattr(TorchOps(), name)(weight, bias)(x)
            found = getattr(PackedOps(), name)(weight, bias)(x)
            torch.testing.assert_close(found, expected, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_packed_int8_products_are_the_exact_ones(dtype: torch.dtype) -> None:
    weight, bias = random(96, 64).to(dtype), random(96, seed=1).to(dtype)
    for rows in FEW_ROWS:
        x = random(rows, 64, seed=rows).to(dtype)
        expected = Int8Ops().linear(weight, bias)(x)
        found = OneDnnInt8Ops().linear(weight, bias)(x)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


@table("size", [16, 48, 64, 192, 1024, 7])
def test_quantizing_is_off_by_half_a_step_at_most(size: int) -> None:
    weight = random(40, size).float()
    wide = spread(weight)
    quantized = quantize_weight(weight)
    back = quantized.values.float() * quantized.scales[:, None]
    assert ((back - wide).abs() <= quantized.scales[:, None] * 0.501).all()
    rows, scales = quantize_rows(weight)
    assert (((rows.float() - 128) * scales - wide).abs() <= scales * 0.501).all()


@table("size", [16, 48, 64, 192, 576, 1024, 1040, 1536, 7])
def test_spreading_keeps_products_and_leaves_no_number_large(size: int) -> None:
    x, weight = random(5, size).float(), random(9, size, seed=1).float()
    torch.testing.assert_close(spread(x) @ spread(weight).T, x @ weight.T, rtol=1e-4, atol=1e-3)
    alone = spread(torch.eye(size))
    assert alone.abs().max() <= 5 * size**-0.5


@table("rows", [1, 2, 4, 7, 64])
@table("size", [64, 192, 1024])
def test_a_few_large_channels_cost_int8_no_more_than_others(
    int8_ops: NativeOps, size: int, rows: int
) -> None:
    weight, x = random(48, size, scale=size**-0.5), random(rows, size, seed=3)
    x[:, [5, size // 2 + 1]] *= 100
    exact_result = x.float() @ weight.float().T
    for ops in (int8_ops, OneDnnInt8Ops(), Int8Ops()):
        error = ops.linear(weight, None)(x).float() - exact_result
        assert error.norm() < 0.015 * exact_result.norm()


@table("size", [64, 192])
def test_int8_loses_less_where_it_knows_how_large_inputs_are(
    int8_ops: NativeOps, size: int
) -> None:
    weight, x = random(48, size, scale=size**-0.5), random(64, size, seed=3)
    x[:, [5, size // 2 + 1]] *= 20
    exact_result = x.float() @ weight.float().T
    sizes = x.float().square().mean(dim=0).sqrt()
    for ops in (int8_ops, OneDnnInt8Ops(), Int8Ops()):
        without, knowing = (
            (one.linear(weight, None)(x).float() - exact_result).norm()
            for one in (ops, ops.for_inputs(sizes))
        )
        assert knowing < 0.8 * without


def test_inputs_that_are_not_finite_or_zero_balance_nothing_away() -> None:
    weight, x = random(32, 64).float(), random(3, 64, seed=1).float()
    expected = Int8Ops().linear(weight, None)(x)
    found = Int8Ops(torch.full((64,), torch.nan)).linear(weight, None)(x)
    assert torch.equal(found, expected)
    assert Int8Ops(torch.zeros(64)).linear(weight, None)(x).isfinite().all()

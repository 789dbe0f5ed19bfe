"""Products of a few rows, with norm, gate and residual, against torch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.torch_device import torch_device
from tests.support.triton_device import NO_TRITON, has_triton

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from worker.model.cuda.gemv import GatedProduct, Product, gemv
from worker.model.layers.ops import Norm, normalize

pytestmark = pytest.mark.triton
F32, BF16 = torch.float32, torch.bfloat16


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(torch_device(), dtype)


def twin(
    x: Tensor, product: Product | GatedProduct, norm: Norm | None, residual: Tensor | None
) -> Tensor:
    """The same in float32, rounded where operators round."""
    inner = product.product if isinstance(product, GatedProduct) else product
    wide = x.float() if norm is None else normalize(x.float(), norm)
    bias = None if inner.bias is None else inner.bias.float()
    result = functional.linear(wide, inner.weight.float(), bias).to(x.dtype)
    if isinstance(product, GatedProduct):
        gate, up = result.chunk(2, dim=1)
        is_silu = product.activation == "silu"
        result = (functional.silu if is_silu else tanh_gelu)(gate) * up
    return result if residual is None else result + residual


def tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("size", "out", "has_bias", "norm", "activation", "has_residual"),
    [
        (96, 70, False, None, None, True),
        (96, 70, True, "plain", None, False),
        (1030, 12, True, "adds one", "silu", False),  # more than one piece of a row
        (2048, 9, False, "plain", "gelu_tanh", True),
        (64, 2050, False, None, None, False),  # more columns a program
    ],
)
def test_equals_the_operators(
    rows: int,
    size: int,
    out: int,
    has_bias: bool,
    norm: str | None,
    activation: str | None,
    has_residual: bool,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(size + rows)
    num_rows_of_weight = out * 2 if activation else out
    weight = random(generator, num_rows_of_weight, size, dtype=dtype) * size**-0.5
    bias = random(generator, num_rows_of_weight, dtype=dtype) if has_bias else None
    product: Product | GatedProduct = Product(weight, bias)
    if activation is not None:
        product = GatedProduct(product, activation)  # type: ignore[arg-type]
    scales = None
    if norm is not None:
        scales = Norm(random(generator, size, dtype=dtype), 1e-6, adds_one=norm == "adds one")
    x = random(generator, rows, size, dtype=dtype) * 3
    residual = random(generator, rows, out, dtype=dtype) if has_residual else None
    before = x.clone(), None if residual is None else residual.clone()
    seen = gemv(x, product, norm=scales, residual=residual)
    expected = twin(x, product, scales, residual)
    tolerance = 2e-5 if dtype is F32 else 2e-2
    torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before[0])
    if residual is not None:
        assert before[1] is not None
        assert torch.equal(residual, before[1])


def test_what_torch_computes_is_the_same_product() -> None:
    generator = torch.Generator().manual_seed(1)
    product = Product(random(generator, 8, 32, dtype=F32), random(generator, 8, dtype=F32))
    gated = GatedProduct(product, "silu")
    x = random(generator, 2, 32, dtype=F32)
    for either in (product, gated):
        torch.testing.assert_close(either(x), twin(x, either, None, None), rtol=1e-5, atol=1e-5)

"""AMX and copies of weights give what our kernels give: AMX in a stand-in for its instructions."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.cpu_kernels import kernels
from tests.support.forced_logits import forced_logits
from tests.support.native_models import build_stack
from worker.engine_options import Quantization
from worker.model.base import DecoderStack
from worker.model.cpu import choices, measuring, tiers
from worker.model.cpu.choices import AMX, AVX, ONEDNN, ProductChoices, ProductShape, Times
from worker.model.cpu.library import NativeKernels, build, cpu_flags
from worker.model.cpu.measuring import ProductMeter
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.processor import cpu_features
from worker.model.kv_cache import KVCachePool

BF16 = torch.bfloat16
EMULATION = Path(__file__).parents[3] / "support" / "amx_emulated.h"
needs_avx512 = pytest.mark.skipif(
    "avx512bw" not in cpu_features(), reason="AMX comes with AVX-512, and so does what is around it"
)
# Two tiles hold at most 32 rows; 16 pairs of bf16, or quadruples of int8, are one step of a tile.
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 70)
SHAPES = ((32, 32), (64, 48), (16, 33), (48, 1), (80, 100), (208, 64), (1024, 32))  # in, out


@cache
def emulated() -> NativeKernels:
    digest = hashlib.sha256(EMULATION.read_bytes()).hexdigest()[:12]
    flags = (f'-DAMX_INTRINSICS="{EMULATION}"', f"-DEMULATION_{digest}")
    features = cpu_features() - {"amx_tile", "amx_bf16", "amx_int8"}
    return NativeKernels(build((*cpu_flags(features), *flags)))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def pairs(quantization: Quantization) -> tuple[NativeOps, NativeOps]:
    """Ops of the tiles, and of the vectors, out of one library."""
    with_tiles = NativeOps(emulated(), quantization=quantization, amx_rows=1)
    return with_tiles, NativeOps(emulated(), quantization=quantization)


def check(found: torch.Tensor, expected: torch.Tensor, quantization: Quantization) -> None:
    if quantization != "none":  # whole numbers: nothing is rounded on the way
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)


@needs_avx512
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_tiles_multiply_as_vectors_do(
    size_in: int, size_out: int, quantization: Quantization
) -> None:
    weight = random(size_out, size_in, seed=1) * size_in**-0.5
    bias = random(size_out, seed=2)
    with_tiles, without = (ops.linear(weight, bias) for ops in pairs(quantization))
    for rows in ROWS:
        x = random(rows, size_in, seed=rows)
        check(with_tiles(x), without(x).clone(), quantization)


@needs_avx512
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("inner", [7, 16, 40])
def test_gated_tiles(inner: int, quantization: Quantization) -> None:
    weight = random(2 * inner, 96, seed=1) * 0.2
    with_tiles, without = (ops.gated_linear(weight, None) for ops in pairs(quantization))
    for rows in ROWS:
        x = random(rows, 96, seed=rows)
        check(with_tiles(x), without(x).clone(), quantization)


@needs_avx512
def test_tiles_compute_from_the_chosen_number_of_rows_on() -> None:
    half = random(32, 512, seed=1)
    weight = torch.cat((half, -half), dim=1)  # sums of nothing but rounding, which tells them apart
    vectors = NativeOps(emulated(), quantization="none").linear(weight, None)
    tiles = NativeOps(emulated(), quantization="none", amx_rows=1).linear(weight, None)
    chosen = NativeOps(emulated(), quantization="none", amx_rows=20).linear(weight, None)
    x = random(64, 512, seed=3).repeat(1, 2)
    assert not torch.equal(vectors(x[:19]), tiles(x[:19]))
    assert not torch.equal(vectors(x[:20]), tiles(x[:20]))
    assert torch.equal(chosen(x[:19]), vectors(x[:19]))
    assert torch.equal(chosen(x[:20]), tiles(x[:20]))


@needs_avx512
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_meter_measures_every_product(quantization: Quantization) -> None:
    shape = ProductShape(96, 64, True)
    meter = ProductMeter(emulated(), quantization=quantization, with_onednn=True)
    times = meter(shape)
    assert set(times) == {AVX, AMX, ONEDNN}
    assert all(len(seconds) == len(choices.ROWS) and min(seconds) > 0 for seconds in times.values())
    without = ProductMeter(kernels("avx2"), quantization=quantization, with_onednn=False)
    assert set(without(shape)) == {AVX}


def test_one_disturbed_moment_makes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    calm: Times = {AVX: (1.0, 4.0), ONEDNN: (1.1, 4.4)}
    disturbed: Times = {AVX: (9.0, 9.0), ONEDNN: (1.1, 4.4)}
    rounds = iter([disturbed, calm, calm])
    monkeypatch.setattr(measuring, "_in_turns", lambda ways, x: next(rounds))
    meter = ProductMeter(kernels("avx2"), quantization="none", with_onednn=True)
    assert choices.choose(meter(ProductShape(96, 64, False))) == choices.Choice()
    assert next(rounds) is calm, "it stops as soon as nothing speaks for a copy"
    always = {AVX: (9.0, 9.0), ONEDNN: (1.1, 4.4)}
    monkeypatch.setattr(measuring, "_in_turns", lambda ways, x: always)
    assert choices.choose(meter(ProductShape(96, 64, False))).copy_rows == choices.ROWS[0]


def test_a_way_that_is_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    call = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *arguments: 1.1 * call(*arguments)
    )
    meter = ProductMeter(kernels("avx2"), quantization="none", with_onednn=True)
    assert set(meter(ProductShape(96, 64, False))) == {AVX}


@pytest.mark.parametrize("operator", ["_reorder_linear_weight", "_linear_pointwise"])
def test_a_way_that_fails_is_not_measured_and_logged(
    operator: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's operators for packed products are private: they may change between versions."""

    def changed(*arguments: object) -> torch.Tensor:
        raise RuntimeError("the operator takes other arguments")

    monkeypatch.setattr(torch.ops.mkldnn, operator, changed)
    meter = ProductMeter(kernels("avx2"), quantization="none", with_onednn=True)
    with caplog.at_level("DEBUG", measuring.__name__):
        assert set(meter(ProductShape(96, 64, False))) == {AVX}
    assert "the operator takes other arguments" in caplog.text


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_model_with_copies_of_its_weights_computes_the_same_model(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True, attention_bias=True)
    texts = [torch.randint(0, 384, (n,)).tolist() for n in (1, 5, 16, 17, 40)]
    alone = forced_logits(path, texts, tier="native", quantization=quantization)
    monkeypatch.setattr(choices, "ROWS", (8, 16))
    monkeypatch.setattr(choices, "LEAST_BYTES", 0)
    pays = ProductChoices(
        lambda shape: {AVX: (1.0, 1.0), ONEDNN: (0.5, 0.5)}, None, copies="on", free_bytes=0
    )
    monkeypatch.setattr(tiers, "product_choices", lambda *arguments: pays)
    monkeypatch.setattr(tiers, "is_quicker", lambda *arguments: True)
    with_copies = forced_logits(path, texts, tier="native", quantization=quantization)
    different = 0
    for one, other in zip(alone, with_copies, strict=True):
        assert (one - other).norm() <= 0.05 * one.norm()
        different += not torch.equal(one, other)
    assert different or quantization == "int8", "no step used a copy"


def test_copies_are_dropped_where_whole_steps_gain_nothing_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    texts = [torch.randint(0, 384, (n,)).tolist() for n in (17, 40)]
    alone = forced_logits(path, texts, tier="native")
    monkeypatch.setattr(choices, "ROWS", (8, 16))
    monkeypatch.setattr(choices, "LEAST_BYTES", 0)
    requested: list[int] = []

    def is_quicker(stack: DecoderStack, other: DecoderStack, pool: KVCachePool, rows: int) -> bool:
        requested.append(rows)
        return False

    pays = ProductChoices(
        lambda shape: {AVX: (1.0, 1.0), ONEDNN: (0.5, 0.5)}, None, copies="on", free_bytes=0
    )
    monkeypatch.setattr(tiers, "product_choices", lambda *arguments: pays)
    monkeypatch.setattr(tiers, "is_quicker", is_quicker)
    without = forced_logits(path, texts, tier="native")
    assert requested == [8]
    for one, other in zip(alone, without, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_the_stack_that_computes_the_same_steps_in_less_time_is_the_quicker_one(
    num_rows: int,
) -> None:
    stack, pool = build_stack(kernels("best"), quantization="none")
    steps: list[int] = []

    def thrice(*step: Any) -> torch.Tensor:
        steps.append(step[2].num_tokens)
        assert step[3].dtype == torch.int32, "as in serving: the kernels read addresses"
        stack(*step)
        stack(*step)
        return stack(*step)

    assert measuring.is_quicker(stack, thrice, pool, num_rows)
    assert not measuring.is_quicker(thrice, stack, pool, num_rows)
    assert set(steps) == {num_rows}

"""Modules of transformers whose products, norms and experts a CPU tier computes."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shared.messages import SamplingParams
from tests.support.engine_run import generate, new_engine
from tests.support.tiny_models import write_tiny_model
from worker.engine.errors import OutOfMemory
from worker.engine_options import CpuTier, EngineOptions, Quantization
from worker.engines.transformers import products
from worker.engines.transformers.gates import replace_gated
from worker.engines.transformers.products import (
    LinearCall,
    SharedProduct,
    groups_of,
    replace_linears,
    replace_norms,
)
from worker.model.base import Activation, Multiply
from worker.model.build import build_model
from worker.model.layers.ops import ComputeExperts, ExpertWeights, TorchOps

# Gates apart and as one, experts, norms of both kinds, windows, soft caps, keys wider than values.
TYPES = ("gemma3_text", "gemma2", "phi3", "mistral", "qwen3_moe", "deepseek_v3", "cohere2")
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
PROMPTS = [np.random.default_rng(n).integers(3, 300, n).tolist() for n in (2, 17, 40, 64)]
F32 = torch.float32


def log_probabilities(
    path: Path, dtype: str, tier: CpuTier = "reference", quantization: Quantization = "none"
) -> Tensor:
    """Of all tokens of all prompts but the first, in chunks that fit no block."""
    built = build_model(
        EngineOptions(
            checkpoint=str(path),
            model_impl="transformers",
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]
            cpu_tier=tier,
            quantization=quantization,
            block_size=16,
            num_kv_blocks=64,
            max_num_batched_tokens=23,
            num_threads=2,
        )
    )
    results = generate(new_engine(built), PROMPTS, SCORED)
    return torch.tensor([entry.logprob for r in results for entry in r.prompt_logprobs])


def rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


@pytest.mark.promise(
    "Transformers: CPU tiers and int8 compute its products as exactly as torch does"
)
@pytest.mark.parametrize("model_type", TYPES)
def test_each_tier_is_about_as_close_to_float32_as_torch(model_type: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, model_type)
    exact = log_probabilities(path, "float32")
    lost = rms(log_probabilities(path, "bfloat16") - exact)
    assert lost < 0.25 * rms(exact - exact.mean()), "the reference itself is lost in noise"
    for tier in ("packed", "native"):
        assert rms(log_probabilities(path, "bfloat16", tier) - exact) <= 1.5 * lost


@pytest.mark.parametrize(("quantization", "most_lost"), [("int8", 0.5), ("int4", 0.9)])
def test_quantized_weights_are_computed_with_in_every_tier(
    quantization: Quantization, most_lost: float, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path, "mistral")
    exact = log_probabilities(path, "float32")
    specified = log_probabilities(path, "bfloat16", "reference", quantization)
    lost = rms(specified - exact)
    assert 0 < lost < most_lost * rms(exact - exact.mean())
    for tier in ("packed", "native"):
        assert rms(log_probabilities(path, "bfloat16", tier, quantization) - exact) <= 1.3 * lost


def test_what_the_native_tier_takes_over(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, "qwen3_moe")
    built = build_model(
        EngineOptions(
            checkpoint=str(path),
            device="cpu",
            dtype="bfloat16",
            cpu_tier="native",
            num_kv_blocks=64,
        )
    )
    network = built.runner._model.network  # type: ignore[attr-defined]
    kinds = Counter(type(module).__name__ for module in network.modules())
    assert kinds["ExpertsModule"] == 3
    assert kinds["NormModule"] == 3 * 4 + 1
    assert kinds["ProductModule"] == 3 * 4 + 1
    assert not kinds["Linear"]


def test_a_tier_that_computes_another_model_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_model(tmp_path, "cohere")
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] += 1.0  # a mean, which its norms take away
    save_file(tensors, file, {"format": "pt"})
    specified = log_probabilities(path, "bfloat16")
    monkeypatch.setattr(products, "agree", lambda module, other, device: True)
    with caplog.at_level("WARNING"):
        found = log_probabilities(path, "bfloat16", "native")
    assert "torch computes its modules" in caplog.text
    torch.testing.assert_close(found, specified, rtol=0.0, atol=0.1)


def test_modules_with_one_input_and_parent_are_a_group() -> None:
    x, y = torch.ones(2), torch.ones(2)
    calls = [
        LinearCall("a.q", x),
        LinearCall("a.k", x),
        LinearCall("b.q", x),
        LinearCall("a.o", y),
        LinearCall("c.twice", y),
        LinearCall("c.twice", x),
    ]
    assert groups_of(calls) == (("a.q", "a.k"), ("b.q",), ("a.o",))


def linear(size_in: int, size_out: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=bias)


class Block(nn.Module):
    """A gated block, whose modules are called with inputs of their own."""

    def __init__(self, after_gate: Sequence[float] = (1.0,), limit: float = math.inf) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(32, 48), linear(32, 48)
        self.down_proj = linear(48, 32, bias=False)
        self.act_fn = nn.SiLU()
        self.gains, self.limit = after_gate, limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        inner = gate.clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        output: Tensor = self.down_proj(inner * self.gains[0])
        return output


class Norm(nn.Module):
    def __init__(self, *, centred: bool, adds_one: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))
        self.eps = 1e-6
        self.centred, self.adds_one = centred, adds_one

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(dim=-1, keepdim=True)
        normal = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return normal * (1 + self.weight) if self.adds_one else normal * self.weight


@pytest.mark.parametrize(("gain", "taken"), [(1.0, 1), (1.1, 0)])
def test_a_block_is_taken_only_if_it_computes_what_its_names_say(gain: float, taken: int) -> None:
    model = nn.Sequential(Block([gain]))
    x = torch.randn(2, 7, 32)
    with torch.inference_mode():
        expected = model(x)
        assert replace_gated(model, TorchOps(), F32) == taken
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


class CountingOps(TorchOps):
    """Notes how many of the weights are alive whenever a gated product is made."""

    def __init__(self, weights: list[weakref.ref[Tensor]]) -> None:
        self.weights, self.alive = weights, list[int]()

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        self.alive.append(sum(one() is not None for one in self.weights))
        return super().gated_linear(weight, bias, activation)


def test_a_replaced_block_is_freed_before_the_next_is_made() -> None:
    model = nn.Sequential(*(Block() for _ in range(6)))
    ops = CountingOps([weakref.ref(block.gate_proj.weight) for block in model])  # type: ignore[arg-type]
    assert replace_gated(model, ops, F32) == 6
    assert ops.alive == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_is_taken_only_if_it_is_one(centred: bool, adds_one: bool) -> None:
    model = nn.Sequential(Norm(centred=centred, adds_one=adds_one))
    x = torch.randn(2, 7, 32)
    with torch.inference_mode():
        expected = model(x)
        assert replace_norms(model, TorchOps(), F32) == (not centred)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
@pytest.mark.parametrize("width", [1024, 4096, 8192])
def test_a_norm_that_centres_stays_at_any_width(width: int, dtype: torch.dtype) -> None:
    centring = nn.Sequential(CohereLayerNorm(width).to(dtype))
    assert replace_norms(centring, TorchOps(), dtype) == 0
    plain = nn.Sequential(LlamaRMSNorm(width).to(dtype))
    assert replace_norms(plain, TorchOps(), dtype) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
@pytest.mark.parametrize(("limit", "taken"), [(math.inf, 1), (7.0, 0), (16.0, 0)])
def test_a_block_that_clamps_stays(limit: float, taken: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(Block(limit=limit)).to(dtype)
    assert replace_gated(model, TorchOps(), dtype) == taken


class ClampingExperts(nn.Module):
    """Experts of which transformers' Mixtral, with one limit more, is the pattern."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 96, 32) / 32**0.5)
        self.down_proj = nn.Parameter(torch.randn(4, 32, 48) / 48**0.5)
        self.act_fn, self.limit = nn.SiLU(), limit

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("ni,eoi->neo", x, self.gate_up_proj).chunk(2, dim=-1)
        inner = self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        results = torch.einsum("nei,eoi->neo", inner, self.down_proj)
        results = results.gather(1, chosen[..., None].expand(-1, -1, results.shape[-1]))
        return (results * weights[..., None]).sum(dim=1)


@pytest.mark.parametrize(("limit", "taken"), [(math.inf, 1), (7.0, 0), (16.0, 0)])
def test_experts_that_clamp_stay(limit: float, taken: int) -> None:
    model = nn.Sequential(ClampingExperts(limit))
    assert replace_gated(model, TorchOps(), F32) == taken


class FailingOps(TorchOps):
    """Whose experts fail: as they are made, or in the trial."""

    def __init__(self, error: Exception, *, when_made: bool) -> None:
        self.error, self.when_made = error, when_made

    def experts(self, weights: ExpertWeights) -> ComputeExperts:
        if self.when_made:
            raise self.error
        return self.compute

    def compute(self, x: Tensor, chosen: Tensor, by: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("when_made", [True, False])
def test_experts_whose_kernel_fails_are_left_to_torch(
    when_made: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(ClampingExperts(math.inf))
    failing = FailingOps(RuntimeError("cannot be compiled"), when_made=when_made)
    assert replace_gated(model, failing, F32) == 0
    assert "a kernel for it fails: RuntimeError: cannot be compiled" in caplog.text
    full = FailingOps(torch.OutOfMemoryError("CUDA out of memory"), when_made=when_made)
    with pytest.raises(OutOfMemory):
        replace_gated(model, full, F32)


def test_products_of_a_group_are_right_in_any_order() -> None:
    model = nn.ModuleDict(
        {name: linear(32, size) for name, size in (("q", 64), ("k", 32), ("v", 16))}
    )
    x, other = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    with torch.inference_mode():
        expected = {
            (name, i): model[name](rows) for name in model for i, rows in enumerate((x, other))
        }
        assert replace_linears(model, [("q", "k", "v")], TorchOps(), F32) == 3
        for order in ("qkv", "vkq", "qqkvv", "kq", "v"):
            for i, rows in enumerate((x, other, x)):
                for name in order:
                    found = model[name](rows)
                    torch.testing.assert_close(found, expected[name, i % 2], rtol=1e-4, atol=1e-5)


def test_a_shared_product_is_computed_once() -> None:
    calls = []

    def multiply(x: Tensor) -> Tensor:
        calls.append(x)
        return torch.cat([x, 2 * x], dim=1)

    product = SharedProduct(multiply, [3, 3])
    x = torch.ones(1, 4, 3)
    assert torch.equal(product.part(0, x), x)
    assert torch.equal(product.part(1, x), 2 * x)
    assert len(calls) == 1

"""All experts of a mixture at once against the code of transformers' modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.torch_device import torch_device
from tests.support.triton_compile import Variant, compile_variants
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from worker.engines.transformers.gates import experts_weights
from worker.model.cuda import experts
from worker.model.cuda.experts import Experts, ExpertTiles, expert_tiles
from worker.model.cuda.kernels.experts import CLAMPED, PLAIN, SILU

pytestmark = pytest.mark.triton
DTYPES = (torch.float32, torch.bfloat16)
HIDDEN, INNER = 96, 48
KERNELS = "worker.model.cuda.kernels.experts"


def module_of(kind: str, dtype: torch.dtype) -> nn.Module:
    common: dict[str, Any] = {"hidden_size": HIDDEN, "experts_implementation": "eager"}
    made: nn.Module
    if kind == "qwen3_moe":
        config: Any = Qwen3MoeConfig(**common, num_experts=20, moe_intermediate_size=INNER)
        made = Qwen3MoeExperts(config)
    elif kind == "mixtral":
        config = MixtralConfig(**common, num_local_experts=8, intermediate_size=INNER)
        made = MixtralExperts(config)
    else:
        config = GptOssConfig(**common, num_local_experts=8, intermediate_size=INNER)
        made = GptOssExperts(config)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made.to(torch_device(), dtype).requires_grad_(False)


def routed(kind: str, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, experts and weights of tokens that leave some experts out."""
    num_experts, num_chosen = {"qwen3_moe": (20, 4), "mixtral": (8, 2), "gpt_oss": (8, 4)}[kind]
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.randn(num_tokens, num_experts, generator=generator)
    scores[:, 1] = -9  # an expert without a token
    scores[: num_tokens // 2, 2] = 9  # and one with many
    by, chosen = scores.softmax(dim=1).topk(num_chosen)
    x = torch.randn(num_tokens, HIDDEN, generator=generator) * 3
    device = torch_device()
    return x.to(device, dtype), chosen.to(device), by.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_equal_those_of_transformers(kind: str, dtype: torch.dtype) -> None:
    module = module_of(kind, dtype)
    weights = experts_weights(module, dtype)
    assert weights is not None
    compute, exact = Experts(weights), copy.deepcopy(module).double()
    for num_tokens in (1, 5, 70):
        x, chosen, by = routed(kind, num_tokens, dtype)
        expected = exact(x.double(), chosen, by.double())
        seen, own = (
            float((one(x, chosen, by) - expected).norm() / expected.norm())
            for one in (compute, module)
        )
        # Nearer than the module's own operators, which round after each one. The interpreter cuts
        # the last bits of bfloat16 off, each time.
        is_cut = IS_INTERPRETED and dtype is torch.bfloat16
        assert seen < max((6 if is_cut else 1.1) * own, 1e-6), (num_tokens, seen, own)


@pytest.mark.parametrize("tiles", [(16, 32, 16), (32, 64, 16), (64, 64, 16), (128, 64, 16)])
def test_tiles_change_nothing(tiles: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("qwen3_moe", torch.float32)
    weights = experts_weights(module, torch.float32)
    assert weights is not None
    step = routed("qwen3_moe", 40, torch.float32)
    monkeypatch.setattr(experts, "expert_tiles", lambda *_: ExpertTiles(*tiles, 4, 2))
    torch.testing.assert_close(Experts(weights)(*step), module(*step), rtol=1e-4, atol=1e-4)


def test_a_token_has_the_same_experts_in_any_company() -> None:
    weights = experts_weights(module_of("qwen3_moe", torch.bfloat16), torch.bfloat16)
    assert weights is not None
    compute = Experts(weights)
    x, chosen, by = routed("qwen3_moe", 12, torch.bfloat16)
    together = compute(x, chosen, by)
    for row in range(len(x)):
        alone = compute(*(part[row : row + 1] for part in (x, chosen, by)))
        assert torch.equal(alone[0], together[row])


@pytest.mark.skipif(not IS_INTERPRETED, reason="of the double of a graph")
def test_a_graph_follows_the_routing() -> None:
    from tests.support.graph_double import GraphDouble

    weights = experts_weights(module_of("mixtral", torch.float32), torch.float32)
    assert weights is not None
    compute = Experts(weights)
    buffers = routed("mixtral", 6, torch.float32)
    replay = GraphDouble()(lambda: compute(*buffers))
    others = [part.flip(0) for part in buffers]
    for buffer, other in zip(buffers, others, strict=True):
        buffer.copy_(other)
    torch.testing.assert_close(replay(), compute(*others))


def test_tiles_divide_the_inner_numbers_and_grow_with_the_tokens() -> None:
    for size in (48, 96, 768, 2048, 2880, 14336):
        assert size % expert_tiles(8, 128, size, 2).inner == 0
    rows = [expert_tiles(pairs, 128, 2048, 2).rows for pairs in (8, 256, 4096, 16384, 65536)]
    assert rows == [16, 16, 32, 64, 128]


def test_experts_of_other_kinds_are_left_alone() -> None:
    assert experts_weights(nn.Linear(16, 16), torch.float32) is None


def sorting() -> Variant:
    signature = {"experts": "*i64", "order": "*i32", "starts": "*i32", "num_pairs": "i32"}
    constants = {"EXPERTS": 128, "BLOCK": 1024}
    return Variant(f"{KERNELS}:sort_pairs", signature, constants)


def summing() -> Variant:
    signature = dict.fromkeys(("results", "weights", "out"), "*bf16") | {"chosen": "i32"}
    constants = {"SIZE": 2048, "BLOCK": 1024}
    return Variant(f"{KERNELS}:sum_pairs", signature, constants)


def product(
    arch: str, num_pairs: int, num_experts: int, size_in: int, size_out: int, activation: int
) -> Variant:
    tiles = expert_tiles(num_pairs, num_experts, size_in, 2)
    numbers = {"limit": "fp32", "alpha": "fp32", "divisor": "i32"}
    signature = {
        **dict.fromkeys(("x", "weight", "bias", "out"), "*bf16"),
        **dict.fromkeys(("order", "starts"), "*i32"),
        **numbers,
    }
    constants = {
        "EXPERTS": num_experts,
        "EXPERTS_WIDTH": num_experts,
        "IN": size_in,
        "OUT": size_out,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.inner,
        "ACTIVATION": activation,
        "HAS_BIAS": activation == int(CLAMPED),
        "PRECISION": "tf32",
    }
    name = f"{KERNELS}:experts_product"
    return Variant(name, signature, constants, arch, tiles.warps, tiles.stages)


@pytest.mark.timeout(600)  # of ptxas
@pytest.mark.skipif(not IS_INTERPRETED, reason="a device compiles them itself")
def test_experts_spill_no_register_and_use_the_matrix_units() -> None:
    silu, clamped, plain = int(SILU), int(CLAMPED), int(PLAIN)
    variants = [
        sorting(),
        summing(),
        *(product("sm_90", pairs, 128, 2048, 768, silu) for pairs in (8, 2560, 8192, 65536)),
        *(product("sm_90", pairs, 128, 768, 2048, plain) for pairs in (8, 65536)),
        *(product("sm_90", pairs, 32, 2880, 2880, clamped) for pairs in (4, 16384)),
        *(product("sm_90", pairs, 8, 4096, 14336, silu) for pairs in (2, 4096)),
        *(product("sm_80", pairs, 128, 2048, 768, silu) for pairs in (8, 65536)),
    ]
    for variant, compiled in zip(variants, compile_variants(variants), strict=True):
        assert compiled.spills == 0, variant
        if "product" in variant.kernel:
            is_wgmma = variant.arch == "sm_90" and variant.constexprs["BLOCK_M"] >= 64
            assert ("wgmma.mma_async" if is_wgmma else "mma.sync") in compiled.ptx, variant
            assert compiled.shared <= (227 if variant.arch == "sm_90" else 164) << 10, variant

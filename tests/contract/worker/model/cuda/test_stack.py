"""CudaStack and its kernels against torch's operators, layer by layer."""

from __future__ import annotations

import pytest
import torch

from tests.support.native_models import FAMILIES, NUM_BLOCKS, new_model, new_pool, run_step
from tests.support.torch_device import torch_device
from tests.support.triton_device import NO_TRITON, has_triton, multiply_in_order

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import FP8, Activation
from worker.model.cpu.library import ATTENTION_BLOCK
from worker.model.cuda.layers import add_norm, gate, store_keys_and_values
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import LayerByLayer
from worker.model.layers.linear_method import activated
from worker.model.layers.ops import Norm, TorchOps

pytestmark = pytest.mark.triton
# (tokens before this step, tokens of this step) of each sequence; decodes first, as in a batch.
STEPS = {
    "one": [(0, 1)],
    "decodes": [(5, 1), (40, 1), (16, 1)],
    "mixed": [(50, 1), (15, 1), (20, 13), (0, 30)],
}
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cuda_stack_equals_torchs_operators(family: str) -> None:
    device, dtype = torch_device(), torch.float32
    twin = new_model(FAMILIES[family], TorchOps(), device=device, dtype=dtype)
    model = new_model(FAMILIES[family], CudaOps(), device=device, dtype=dtype)
    config = model.config
    pools = [new_pool(config, device=device, dtype=dtype) for _ in range(2)]
    by_layers = LayerByLayer(twin, SdpaAttention(pools[0], config.layer_scores))
    stack = CudaStack(model, pools[1])
    for name, step in STEPS.items():
        expected, seen = (run_step(one, step, device=device) for one in (by_layers, stack))
        assert seen.shape == (len(step), config.hidden_size)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4, msg=name)
        torch.testing.assert_close(
            pools[1].storage, pools[0].storage, rtol=1e-4, atol=1e-4, msg=name
        )


def test_the_stack_keeps_keys_and_values_in_fp8_as_torchs_operators_do() -> None:
    device, dtype = torch_device(), torch.float32
    twin = new_model(FAMILIES["qwen3"], TorchOps(), device=device, dtype=dtype)
    model = new_model(FAMILIES["qwen3"], CudaOps(), device=device, dtype=dtype)
    pools = [new_pool(model.config, device=device, dtype=FP8) for _ in range(2)]
    by_layers = LayerByLayer(twin, SdpaAttention(pools[0], model.config.layer_scores))
    stack = CudaStack(model, pools[1])
    expected, seen = (run_step(one, STEPS["mixed"], device=device) for one in (by_layers, stack))
    # A number between two of e4m3 may become the one or the other, by the last bit.
    assert (seen - expected).norm() < 0.01 * expected.norm()
    same = pools[0].storage.view(torch.uint8) == pools[1].storage.view(torch.uint8)
    assert same.float().mean() > 0.999


def test_the_last_blocks_of_a_pool_beyond_2_to_the_31_numbers_are_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is taken as it is written: on a CPU, that of the few blocks in use."""
    multiply_in_order(monkeypatch)
    device, dtype, block_size = torch_device(), torch.bfloat16, ATTENTION_BLOCK
    model = new_model(FAMILIES["qwen3"], CudaOps(), device=device, dtype=dtype)
    layer = model.config.kv_layers[0]
    num_blocks = (1 << 31) // (block_size * layer.numbers * len(model.config.kv_layers)) + 60
    pool = KVCachePool(model.config, num_blocks, block_size, device=device, dtype=dtype)
    assert pool.storage.numel() > 1 << 31
    parts = [slice(0, NUM_BLOCKS), slice(num_blocks - NUM_BLOCKS, num_blocks)]
    seen = []
    for part in parts:
        generator = torch.Generator().manual_seed(3)
        past = torch.randn(NUM_BLOCKS, pool.storage.shape[1], generator=generator)
        pool.storage[part] = past.to(device, dtype)
        stack = CudaStack(model, pool)
        seen.append(run_step(stack, STEPS["mixed"], device=device, first_block=part.start))
        k = torch.randn(3, layer.num_kv_heads, layer.key_dim, generator=generator)
        slots = torch.arange(3, dtype=torch.int32) * (block_size + 1) + part.start * block_size
        views = pool.keys[2], pool.values[2]
        store_keys_and_values(k.to(device, dtype), k.to(device, dtype), *views, slots.to(device))
        assert torch.equal(pool.keys[2][part][1, 1], k[1].to(device, dtype))
    assert torch.equal(*seen)
    assert torch.equal(*(pool.storage[part] for part in parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds_one", [False, True])
def test_add_norm_equals_its_twin(dtype: torch.dtype, adds_one: bool) -> None:
    device = torch_device()
    generator = torch.Generator().manual_seed(1)
    x, delta = (torch.randn(3, 96, generator=generator).to(device, dtype) for _ in range(2))
    norms = [
        Norm(torch.randn(96, generator=generator).to(device, dtype), eps, adds_one)
        for eps in (1e-5, 1e-6)
    ]
    for added, delta_norm in ((None, None), (delta, None), (delta, norms[1])):
        expected = TorchOps().add_norm(x, added, norms[0], delta_norm)
        seen = add_norm(x.clone(), added, norms[0], delta_norm)
        for one, other in zip(seen, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_equals_its_twin(dtype: torch.dtype, activation: Activation) -> None:
    both = (torch.randn(3, 2 * 1100, generator=torch.Generator().manual_seed(2)) * 4).to(
        torch_device(), dtype
    )
    expected = activated(lambda x: x, activation)(both)
    tolerance = DTYPES[dtype]
    torch.testing.assert_close(gate(both, activation), expected, rtol=tolerance, atol=tolerance)

"""A row has the same bits alone, in any batch, as a decode and as part of a prompt."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support import native_models
from tests.support.native_models import NUM_BLOCKS, QWEN3, new_model
from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton, multiply_in_order

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from tests.support.step_graphs import new_capture, new_graphs
from worker.model.cuda import attention
from worker.model.cuda.invariant import InvariantOps, InvariantProduct
from worker.model.cuda.stack import CudaStack

pytestmark = pytest.mark.triton
# The interpreter's bits are not to be rounded away; a device is to use its matrix units.
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_order(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_has_the_same_bits_for_every_number_of_rows(dtype: torch.dtype) -> None:
    x, weight, bias = (
        torch.randn(shape, device=torch_device()).to(dtype)
        for shape in ((200, 200), (130, 200), (130,))
    )
    product = InvariantProduct(weight, bias)
    whole = product(x)
    near = functional.linear(x.double(), weight.double(), bias.double())
    tolerance = 1e-4 if dtype is torch.float32 else 0.01
    torch.testing.assert_close(whole.double(), near, rtol=tolerance, atol=tolerance * 10)
    for begin, count in ((0, 1), (3, 2), (70, 64), (100, 65)):
        assert torch.equal(product(x[begin : begin + count]), whole[begin : begin + count])


def test_a_prompt_has_the_bits_of_its_decodes_and_neighbours_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_INVARIANT_KEYS", 16)
    device = torch_device()
    model = new_model(QWEN3 | {"num_hidden_layers": 2}, InvariantOps(), device=device, dtype=DTYPE)
    decodes = range(37, 40)
    alone: list[list[tuple[int, int]]] = [[(0, 37)], *([(past, 1)] for past in decodes)]
    among = [[(0, 37), (0, 9)], *([(past, 1), (5, 1), (0, 9)] for past in decodes)]
    found = []
    for steps in ([[(0, 40)]], alone, among):
        pool = native_models.new_pool(model.config, device=device, dtype=DTYPE)
        stack = CudaStack(model, pool, is_invariant=True)
        assert stack.run_gemv_into is None, "products of few rows sum in another order"
        for step in steps:
            last = native_models.run_step(stack, step, device=device)[0].clone()
        # What the first sequence has in its three blocks.
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))[:3]
        kept = [torch.cat(list(part[blocks]))[:40] for part in (*pool.keys, *pool.values)]
        found.append([last, *kept])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_replayed_steps_have_the_bits_of_prompts() -> None:
    device = torch_device()
    model = new_model(QWEN3 | {"num_hidden_layers": 1}, InvariantOps(), device=device, dtype=DTYPE)
    pools = [native_models.new_pool(model.config, device=device, dtype=DTYPE) for _ in range(2)]
    stack = CudaStack(model, pools[0], is_invariant=True)
    graphs = new_graphs(
        model,
        CudaStack(model, pools[1], is_invariant=True),
        max_num_seqs=3,
        max_num_tokens=20,
        max_blocks=3,
    )
    graphs.capture_by(new_capture(), lambda share: None)
    # A prompt; one more token of it, beside a decode and a chunk; and then alone.
    for step, whole in (
        ([(0, 18)], [(0, 18)]),
        ([(18, 1), (4, 1), (0, 7)], [(0, 19)]),
        ([(19, 1)], [(0, 20)]),
    ):
        seen = native_models.run_step(graphs, step, device=device)[0]
        expected = native_models.run_step(stack, whole, device=device)[0]
        assert torch.equal(seen, expected), step

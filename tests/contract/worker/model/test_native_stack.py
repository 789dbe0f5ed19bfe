"""All layers in one call of the kernels say what the same kernels say layer by layer."""

from __future__ import annotations

import pytest
import torch

from tests.support.cpu_kernels import kernels, variants
from tests.support.native_models import FAMILIES, new_model, new_pool, run_step
from worker.engine_options import Quantization
from worker.model.cpu.library import NativeKernels
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.native_stack import NativeAttention, NativeStack
from worker.model.layers.decoder import LayerByLayer

# (tokens before this step, tokens of this step) of each sequence; decodes first, as in a batch.
STEPS = {
    "one": [(0, 1)],
    "prefill": [(0, 37)],
    "decodes": [(5, 1), (40, 1), (16, 1), (1, 1), (31, 1)],
    "mixed": [(70, 1), (15, 1), (20, 13), (0, 50)],
}
# Sequences whose last token's state is wanted.
WANTED: dict[str, list[list[int]]] = {
    "one": [[0]],
    "prefill": [[0], []],
    "decodes": [[0, 1, 2, 3, 4]],
    "mixed": [[0, 1, 2, 3], [0, 1, 3], [0, 1], [2], []],
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> NativeKernels:
    return kernels(request.param)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_native_stack_equals_its_layers(
    library: NativeKernels, family: str, quantization: Quantization
) -> None:
    model = new_model(FAMILIES[family], NativeOps(library, quantization=quantization))
    config = model.config
    pools = [new_pool(config), new_pool(config)]
    by_layers = LayerByLayer(model, NativeAttention(pools[0], library, config.layer_scores))
    at_once = NativeStack(model, pools[1], library)
    for name, step in STEPS.items():  # one after the other: memory is used again, and grows
        for wanted in WANTED[name]:
            expected, seen = (run_step(stack, step, wanted) for stack in (by_layers, at_once))
            assert seen.shape == (len(wanted), config.hidden_size)
            assert torch.equal(seen, expected), (name, wanted)
            assert seen.isfinite().all()
            assert torch.equal(pools[0].storage, pools[1].storage), (name, wanted)

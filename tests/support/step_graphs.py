"""StepGraphs over a stack, and what captures them where tests run."""

from __future__ import annotations

import torch

from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED
from worker.model.cuda.graphs import Capture, CudaCapture, StepGraphs
from worker.model.cuda.stack import CudaStack
from worker.model.layers.decoder import CausalLM


def new_capture(fastest: int = 0) -> Capture:
    """Returns one for graphs of the device; in the interpreter a double, for which of several ways
    the one of this number is the fastest."""
    if not IS_INTERPRETED:
        return CudaCapture(torch_device())
    from tests.support.graph_double import GraphDouble

    return GraphDouble(fastest)


def new_graphs(
    model: CausalLM,
    stack: CudaStack,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_blocks: int,
    device: torch.device | None = None,
    num_kv_groups: int = 1,
) -> StepGraphs:
    """Returns graphs that are not captured yet; None: of the device that tests run on."""
    return StepGraphs(
        stack,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        max_blocks=max_blocks,
        device=device or torch_device(),
        logits=model.logits,
        num_kv_groups=num_kv_groups,
    )

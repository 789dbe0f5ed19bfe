"""What computes a native family on CUDA: this project's kernels, or torch's operators.

triton  kernels for attention and between products, steps as CUDA graphs; sm_80 and up
sdpa    torch's own operators; every device, what the kernels are measured against
"""

from __future__ import annotations

import logging

import torch

from worker.engine_options import CUDA_BATCHED_TOKENS, EngineOptions
from worker.model.cpu.tiers import Tier, TierRequest, reference_tier
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, DecoderStack
from worker.model.layers.linear import Placement

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)  # before it there is no bfloat16, and the kernels spill their registers


def cuda_tier(
    options: EngineOptions, request: TierRequest, placement: Placement, max_blocks: int
) -> Tier:
    """Returns the tier that `options` want, or the fastest. `max_blocks` are those of the longest
    sequence. Raises ModelError where the one wanted cannot run here."""
    if not uses_kernels(options, placement.device):
        return reference_tier(request)
    # Here and not above: they need Triton.
    from worker.model.cuda.graphs import StepGraphs
    from worker.model.cuda.stack import CudaOps, CudaStack

    def stack(model: CausalLM, pool: KVCachePool) -> DecoderStack:
        whole = CudaStack(model, pool)
        if not options.cuda_graphs or placement.group.size > 1:
            return whole
        return StepGraphs(
            whole,
            max_num_seqs=options.max_num_seqs,
            max_num_tokens=options.max_num_batched_tokens or CUDA_BATCHED_TOKENS,
            max_blocks=max_blocks,
            device=placement.device,
            logits=model.logits,
        )

    return Tier("triton", CudaOps(), stack)


def uses_kernels(options: EngineOptions, device: torch.device) -> bool:
    """Returns whether this project's kernels attend on a CUDA device. Raises ModelError where they
    are wanted and cannot run."""
    if options.attention_backend == "sdpa":
        return False
    reason = _what_is_wrong(device)
    if reason is None:
        return True
    if options.attention_backend == "triton":
        raise ModelError(f"attention_backend 'triton' cannot be had: {reason}")
    logger.warning("torch's operators compute the attention, which is slow: %s", reason)
    return False


def _what_is_wrong(device: torch.device) -> str | None:
    """Returns why the kernels cannot run on the device, None where they can."""
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has less than compute capability 8.0"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return None

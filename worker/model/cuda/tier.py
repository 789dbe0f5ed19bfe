"""Chooses the CUDA tier: this project's Triton kernels, or torch's operators.

triton  kernels for attention and between products, steps as CUDA graphs; sm_80 and up
sdpa    torch's own operators; every device, what the kernels are measured against
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from worker.engine_options import CUDA_BATCHED_TOKENS, EngineOptions
from worker.model.base import DecoderStack
from worker.model.cuda import toolchain
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement
from worker.model.served import ServedModel
from worker.model.tier import ATTENTION_BACKENDS, Tier, TierRequest, reference_tier

if TYPE_CHECKING:
    from worker.model.cuda.graphs import CapturedStack

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)  # before it there is no bfloat16, and the kernels spill their registers

_FP8_CAPABILITY = (8, 9)


def tier_of(
    options: EngineOptions, request: TierRequest, placement: Placement, max_model_len: int
) -> Tier:
    """Returns the tier that `options` request, or the fastest. Raises ModelError where the
    requested one cannot run here."""
    for name, value, known in (
        ("cpu_tier", options.cpu_tier, ("auto",)),
        ("quantization", options.quantization, ("none", "fp8")),
    ):
        if value not in known:
            raise ModelError(f"{name} {value!r} is for the CPU, the device is {placement.device}")
    stored = request.config.fp8 if request.config is not None else None
    in_fp8 = stored is not None and keeps_fp8(options, placement)
    if not uses_kernels(options, placement.device):
        if options.batch_invariant:
            raise ModelError(
                "PENSTOCK_BATCH_INVARIANT needs this project's Triton kernels, which "
                f"{placement.device} does not use: see PENSTOCK_ATTENTION_BACKEND"
            )
        return reference_tier(request)
    capability = torch.cuda.get_device_capability(placement.device)
    if options.kv_cache_dtype != "auto" and capability < _FP8_CAPABILITY:
        raise ModelError(
            f"kv_cache_dtype {options.kv_cache_dtype!r} needs compute capability 8.9 with Triton, "
            f"{torch.cuda.get_device_name(placement.device)} has "
            f"{'.'.join(map(str, capability))}; set PENSTOCK_ATTENTION_BACKEND=sdpa to keep it"
        )
    # Here and not above: they need Triton.
    from worker.model.cuda.invariant import InvariantOps
    from worker.model.cuda.stack import CudaOps, CudaStack

    ops = InvariantOps() if options.batch_invariant else CudaOps()

    def stack(model: CausalLM, pool: KVCachePool) -> DecoderStack:
        whole = CudaStack(model, pool, is_invariant=options.batch_invariant)
        return with_graphs(whole, options, model, max_model_len, pool, whole.layer_weights)

    if not in_fp8:
        return Tier("triton", ops, stack)
    from worker.model.cuda.fp8 import CudaFp8Method

    return Tier("triton", ops, stack, CudaFp8Method)


def with_graphs(
    stack: CapturedStack,
    options: EngineOptions,
    model: ServedModel,
    max_model_len: int,
    pool: KVCachePool,
    layer_weights: int | None = None,
) -> DecoderStack:
    """Returns a stack that replays the steps of `stack`, which uses the kernels; `stack` where
    there are to be no graphs. `layer_weights` are the numbers in the products of a layer; None
    for a stack whose code is not this project's, of which only decodes are replayed."""
    if not options.cuda_graphs or model.placement.group.size > 1:
        return stack
    # Here and not above: it needs Triton.
    from worker.model.cuda.graphs import StepGraphs, launch_bound_tokens

    max_num_tokens = 0
    if layer_weights is not None:
        budget = options.max_num_batched_tokens or CUDA_BATCHED_TOKENS
        max_num_tokens = min(budget, launch_bound_tokens(layer_weights))
    return StepGraphs(
        stack,
        max_num_seqs=options.max_num_seqs,
        max_num_tokens=max_num_tokens,
        max_blocks=-(-max_model_len // pool.block_size),
        device=model.placement.device,
        logits=model.logits,
        num_kv_groups=len(pool.groups.windows),
        is_foreign=layer_weights is None,
    )


def uses_kernels(options: EngineOptions, device: torch.device) -> bool:
    """Returns whether this project's kernels attend on a CUDA device. Raises ModelError where they
    are wanted and cannot run."""
    if options.attention_backend in ATTENTION_BACKENDS:
        return False
    reason = unavailable_reason(device)
    if reason is None:
        return True
    if options.attention_backend == "triton":
        raise ModelError(f"attention_backend 'triton' is unavailable: {reason}")
    logger.warning("attention falls back to torch's operators, which are slow: %s", reason)
    return False


def keeps_fp8(options: EngineOptions, placement: Placement) -> bool:
    """Returns whether the tier multiplies by weights in FP8. Tries it; logs why it does not. Raises
    ModelError where `options` demand it: as bfloat16 the weights take twice the memory."""
    reason = _fp8_fault(options, placement)
    if reason is None:
        return True
    if options.quantization == "fp8":
        raise ModelError(f"quantization 'fp8' is unavailable: {reason}")
    logger.warning(
        "FP8 weights are loaded as %s and take twice the memory: %s", placement.dtype, reason
    )
    return False


def _fp8_fault(options: EngineOptions, placement: Placement) -> str | None:
    """Returns why products over FP8 are unavailable, None where they are not."""
    device = placement.device
    if options.attention_backend == "sdpa":
        return "with attention_backend 'sdpa' torch's operators compute the model"
    if reason := unavailable_reason(device):
        return reason
    if options.batch_invariant:
        return "products of FP8 depend on the number of rows, and PENSTOCK_BATCH_INVARIANT is on"
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has less than compute capability 8.9"
    if placement.dtype is not torch.bfloat16:
        return f"products of FP8 give bfloat16, the model is {placement.dtype}"
    from worker.model.cuda import fp8

    return fp8.unavailable_reason(device)


def unavailable_reason(device: torch.device) -> str | None:
    """Returns why the kernels cannot run on the device, None where they can."""
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has less than compute capability 8.0"
    return toolchain.unavailable_reason(device)

"""Chooses the CPU tier: the fastest that runs the model on this machine, or the requested one.

reference  torch's own operators; every dtype, every platform; what the others are measured against
packed     products over weights in oneDNN's layout
native     kernels.cpp, where a compiler and AVX2 are at hand and the model is bfloat16
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from worker.engine_options import CpuTier, EngineOptions
from worker.model.base import DecoderStack
from worker.model.cpu import native_ops
from worker.model.cpu.library import ATTENTION_BLOCK, NativeKernels, build_for
from worker.model.cpu.measuring import is_quicker, product_choices, unavailable_reason
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.native_stack import NativeAttention, NativeStack
from worker.model.cpu.onednn_ops import PACKED_OPS
from worker.model.cpu.processor import cpu_features
from worker.model.errors import ModelError, TierUnavailable
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer, StackByRows
from worker.model.layers.ops import Ops
from worker.model.parallel.group import Placement
from worker.model.tier import REFERENCE_OPS, Tier, TierRequest, layer_by_layer, reference_tier

logger = logging.getLogger(__name__)


def tier_of(
    options: EngineOptions, request: TierRequest, placement: Placement, max_model_len: int
) -> Tier:
    """Returns the CPU's tier by `options.cpu_tier`. Raises ModelError."""
    return choose_tier(options.cpu_tier, request)


def choose_tier(wanted: CpuTier, request: TierRequest) -> Tier:
    """Returns the tier `wanted`, or the fastest. Raises ModelError where it is unavailable."""
    if wanted == "reference":
        return reference_tier(request)
    if wanted in ("packed", "native"):
        try:
            return packed_tier(request) if wanted == "packed" else native_tier(request)
        except TierUnavailable as error:
            raise ModelError(f"cpu_tier {wanted!r} is unavailable: {error}") from error
    if request.dtype is not torch.bfloat16 and request.quantization == "none":
        return reference_tier(request)  # packing pays where torch would reorder at every call
    for name, make in (("native", native_tier), ("packed", packed_tier)):
        try:
            return make(request)
        except TierUnavailable as error:
            logger.warning("CPU tier %s is unavailable: %s", name, error)
    return reference_tier(request)


def packed_tier(request: TierRequest) -> Tier:
    """Returns the tier of oneDNN's products.

    Raises TierUnavailable where torch's private operators are not what they were.
    """
    return Tier("packed", _packed_ops(request), layer_by_layer(request))


def _packed_ops(request: TierRequest) -> Ops:
    """Returns oneDNN's operations. Raises TierUnavailable."""
    if request.quantization not in PACKED_OPS:
        raise TierUnavailable(f"it has no products for quantization {request.quantization!r}")
    ops = PACKED_OPS[request.quantization]()
    _check(ops, request)
    return ops


def native_tier(request: TierRequest) -> Tier:
    """Returns the tier of the compiled kernels, built if need be. Raises TierUnavailable."""
    if request.block_size != ATTENTION_BLOCK:
        raise TierUnavailable(
            f"block_size is {request.block_size}, its kernels need {ATTENTION_BLOCK}"
        )
    if request.kv_dtype not in (None, request.dtype):
        raise TierUnavailable("its attention kernels read bfloat16, kv_cache_dtype is fp8")
    assert request.config is not None, "a stack is of a configuration"
    if reason := native_ops.unavailable_reason(request.config):
        raise TierUnavailable(reason)
    kernels, ops = _native_ops(request)

    def stack(model: CausalLM, pool: KVCachePool) -> DecoderStack:
        if request.num_ranks > 1:
            logger.info(
                "the native tier computes layer by layer, because ranks sum within each layer"
            )
            attention = NativeAttention(pool, kernels, model.config.layer_scores)
            return LayerByLayer(model, attention)
        whole = NativeStack(model, pool, kernels)
        if copy_rows := whole.copy_rows:
            attention = NativeAttention(pool, kernels, model.config.layer_scores)
            by_layer = LayerByLayer(model, attention)
            # Calls from Python, and two libraries' threads in turns, cost what no product shows.
            if is_quicker(by_layer, whole, pool, copy_rows):
                return StackByRows(whole, by_layer, copy_rows)
        ops.drop_copies()
        return whole

    return Tier("native", ops, stack, has_own_threads=True)


def _native_ops(
    request: TierRequest, *, keeps_results: bool = False
) -> tuple[NativeKernels, NativeOps]:
    """Returns the compiled kernels and the operations over them. Raises TierUnavailable."""
    if request.quantization not in PACKED_OPS:
        raise TierUnavailable(f"it has no products for quantization {request.quantization!r}")
    if request.dtype is not torch.bfloat16:
        raise TierUnavailable(f"the kernels compute in bfloat16, the model is {request.dtype}")
    library = build_for(cpu_features(), request.compiling)
    kernels = NativeKernels(library)
    kernels.set_num_threads(request.num_threads)
    _check(NativeOps(kernels, quantization=request.quantization), request)
    ops = NativeOps(
        kernels,
        quantization=request.quantization,
        choices=product_choices(kernels, library.name, request),
        torch_threads=request.num_threads,
        keeps_results=keeps_results,
    )
    return kernels, ops


@dataclass(frozen=True, slots=True)
class Products:
    """A tier's operations for modules that are not ours: each result has memory of its own."""

    name: str
    ops: Ops
    kernels: NativeKernels | None = None  # the native tier's, for its attention


def choose_products(wanted: CpuTier, request: TierRequest) -> Products:
    """Returns those of the tier `wanted`, or of the fastest, as `choose_tier` does. Raises
    ModelError where they are unavailable."""
    is_plain = request.dtype is not torch.bfloat16 and request.quantization == "none"
    names = ("native", "packed") if wanted == "auto" and not is_plain else (wanted,)
    for name in names:
        try:
            if name == "native":
                kernels, ops = _native_ops(request, keeps_results=True)
                return Products(name, ops, kernels)
            if name == "packed":
                return Products(name, _packed_ops(request))
        except TierUnavailable as error:
            if wanted != "auto":
                raise ModelError(f"cpu_tier {wanted!r} is unavailable: {error}") from error
            logger.warning("CPU tier %s is unavailable: %s", name, error)
    return Products("reference", REFERENCE_OPS[request.quantization]())


def _check(ops: Ops, request: TierRequest) -> None:
    """Raises TierUnavailable for a tier whose products are wrong: better slow than wrong."""
    like = REFERENCE_OPS[request.quantization]()
    if reason := unavailable_reason(ops, like, request.dtype):
        raise TierUnavailable(f"its matrix products are wrong on this machine: {reason}")

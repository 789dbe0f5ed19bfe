"""Tier: what computes a native family on a device; the reference tier runs on every device.

A tier is asked before the weights are loaded: it has the methods of the linear layers (see
worker.model.layers.linear_method), the operations between them, and the stack that calls both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shared.cores import default_threads
from worker.engine_options import EngineOptions, Quantization, WeightCopies
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import AttentionBackend, DecoderStack, LayerScores
from worker.model.config.model_config import ModelConfig
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.fp8 import Fp8Layout
from worker.model.layers.int4 import Int4Ops
from worker.model.layers.int8 import Int8Ops
from worker.model.layers.linear_method import LinearMethod
from worker.model.layers.ops import Ops, TorchOps
from worker.model.parallel.group import Placement

Attention = Callable[[KVCachePool, Sequence[LayerScores]], AttentionBackend]

# By type of device: modules with a function `tier_of`.
_TIERS = {"cpu": "worker.model.cpu.tiers", "cuda": "worker.model.cuda.tier"}
# By PENSTOCK_QUANTIZATION: operations that run on every device. Faster tiers have their own.
REFERENCE_OPS: dict[str, Callable[[], Ops]] = {
    "none": TorchOps,
    "int8": Int8Ops,
    "int4": Int4Ops,
}
# By PENSTOCK_ATTENTION_BACKEND: attention for tiers that compute layer by layer.
ATTENTION_BACKENDS: dict[str, Attention] = {"sdpa": SdpaAttention}


@dataclass(frozen=True, slots=True)
class Tier:
    """`ops` for the model's layers, and what computes all of them over a pool.

    `stack` is for a model that was finished with the `ops`. `fp8_method` serves weights that are
    stored in FP8; without it they are loaded in the model's dtype. `has_own_threads`: torch
    computes next to nothing of a step, so its own threads would only stand in the way.
    """

    name: str
    ops: Ops
    stack: Callable[[CausalLM, KVCachePool], DecoderStack]
    fp8_method: Callable[[Fp8Layout], LinearMethod] | None = None
    has_own_threads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRequest:
    """What the model needs of a tier; without a `config`, its products alone."""

    config: ModelConfig | None  # this rank's
    dtype: torch.dtype
    block_size: int
    quantization: Quantization = "none"
    attention: str = "auto"  # "auto" and names of other tiers' attention become "sdpa"
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: `dtype`
    num_threads: int = 1
    num_ranks: int = 1  # among which the layers are divided; they add up after products
    weight_copies: WeightCopies = "auto"  # the native tier's
    memory_share: float = 1.0  # of the free memory; the rest is other workers'
    compiling: Callable[[float], None] = lambda share: None  # as kernels are compiled


def reference_tier(request: TierRequest) -> Tier:
    """Returns the tier of torch's own operators, which is available everywhere."""
    return Tier("reference", REFERENCE_OPS[request.quantization](), layer_by_layer(request))


def layer_by_layer(request: TierRequest) -> Callable[[CausalLM, KVCachePool], DecoderStack]:
    """Returns the stack of a tier that computes each layer by itself."""
    attention = ATTENTION_BACKENDS.get(request.attention, SdpaAttention)
    return lambda model, pool: LayerByLayer(model, attention(pool, model.config.layer_scores))


def choose_tier(
    options: EngineOptions,
    config: ModelConfig,
    placement: Placement,
    max_model_len: int,
    block_size: int,
    compiling: Callable[[float], None],
) -> Tier:
    """Returns the tier of the device, before any weight is read. `config` is this rank's.

    Raises ModelError.
    """
    request = TierRequest(
        config=config,
        dtype=placement.dtype,
        block_size=block_size,
        quantization=options.quantization,
        attention=options.attention_backend,
        kv_dtype=placement.kv_dtype,
        num_threads=options.num_threads or default_threads(),
        num_ranks=placement.group.size,
        weight_copies=options.cpu_weight_copies,
        memory_share=options.memory_share,
        compiling=compiling,
    )
    # By name, when it is needed: the kernels of CUDA need Triton, which a CPU's PyTorch lacks.
    tiers = importlib.import_module(_TIERS[placement.device.type])
    tier: Tier = tiers.tier_of(options, request, placement, max_model_len)
    return tier

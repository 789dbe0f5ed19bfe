"""Tier: what computes a native family on a device; the reference tier, which runs on every one.

A tier is asked before the weights are loaded: it has the methods of the linear layers (see
worker.model.layers.linear_method), the operations between them, and the stack that calls both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worker.engine_options import Quantization, WeightCopies
from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import AttentionBackend, DecoderStack, LayerScores
from worker.model.config.model_config import ModelConfig
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.fp8 import Fp8Layout
from worker.model.layers.int8 import Int8Ops
from worker.model.layers.linear_method import LinearMethod
from worker.model.layers.ops import Ops, TorchOps

Attention = Callable[[KVCachePool, Sequence[LayerScores]], AttentionBackend]

# By PENSTOCK_QUANTIZATION: operations that run on every device. Faster tiers have their own.
REFERENCE_OPS: dict[str, Callable[[], Ops]] = {"none": TorchOps, "int8": Int8Ops}
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

    config: ModelConfig | None
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

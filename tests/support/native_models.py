"""Small models of random weights on any tier, and steps over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from worker.engine_options import Quantization
from worker.model.base import AttentionMetadata, DecoderStack
from worker.model.config.model_config import ModelConfig
from worker.model.cpu.library import ATTENTION_BLOCK, NativeKernels
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.native_stack import NativeStack
from worker.model.kv_cache import KVCachePool, KVGroups
from worker.model.layers.decoder import CausalLM
from worker.model.layers.fp8 import Fp8Layout, Fp8Method
from worker.model.layers.linear_method import LinearMethod
from worker.model.layers.ops import Ops
from worker.model.parallel.group import ALONE, Placement, RankGroup
from worker.model.weights.loader import Checkpoint, fill_with_noise

CPU = torch.device("cpu")
MAX_LEN = 96
NUM_BLOCKS = 24
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 211,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_LEN,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3": QWEN3,
    "qwen2": QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": QWEN3
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 21},
    "gemma3_text": QWEN3
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 21,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 100.0,
    },
}


def build_stack(
    library: NativeKernels, *, quantization: Quantization, num_layers: int = 3
) -> tuple[NativeStack, KVCachePool]:
    """A Qwen3 of that many layers, and the pool of its keys and values."""
    ops = NativeOps(library, quantization=quantization)
    model = new_model(QWEN3 | {"num_hidden_layers": num_layers}, ops)
    pool = new_pool(model.config)
    return NativeStack(model, pool, library), pool


def new_model(
    shape: dict[str, object],
    ops: Ops,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
) -> CausalLM:
    model = CausalLM(ModelConfig.from_dict(shape), MAX_LEN, Placement(device, dtype), ops)
    fill_with_noise(model)
    noise = torch.Generator().manual_seed(2)
    for _, place in model.named_tensors():
        if place.columns is None:  # norms of 1 and biases of 0 would show no mistake
            place.data.add_((torch.randn(place.data.shape, generator=noise) * 0.2).to(device))
    model.finish()
    return model


def model_in_fp8(
    path: Path,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    group: RankGroup = ALONE,
    ops: Ops | None = None,
    method: Callable[[Fp8Layout], LinearMethod] = Fp8Method,
) -> CausalLM:
    """A checkpoint's model whose weights stay in FP8, as on CUDA."""
    config = ModelConfig.from_directory(path)
    checkpoint = Checkpoint(path, config)
    placement = Placement(device, dtype, group)
    stored = {name: method(layout) for name, layout in checkpoint.fp8_layouts.items()}
    model = CausalLM(config, MAX_LEN, placement, ops, stored)
    checkpoint.load(model)
    return model


def new_pool(
    config: ModelConfig,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
    groups: KVGroups | None = None,
) -> KVCachePool:
    """NUM_BLOCKS for each KV group."""
    num_blocks = NUM_BLOCKS * (1 if groups is None else len(groups.windows))
    pool = KVCachePool(
        config, num_blocks, ATTENTION_BLOCK, device=device, dtype=dtype, groups=groups
    )
    noise = torch.Generator().manual_seed(3)
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=noise))
    return pool


def run_step(
    stack: DecoderStack,
    step: list[tuple[int, int]],
    wanted: list[int] | None = None,
    *,
    device: torch.device = CPU,
    first_block: int = 0,
) -> torch.Tensor:
    """[wanted, hidden], by itself of all sequences, which have blocks of their own in an order of
    no order, among the NUM_BLOCKS from the first."""
    lengths = [before + count for before, count in step]
    width = -(-max(lengths) // ATTENTION_BLOCK)
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)) + first_block
    table = blocks[: len(step) * width].to(torch.int32).view(len(step), width)
    positions = torch.cat([torch.arange(b, b + n, dtype=torch.int32) for b, n in step])
    counts = torch.tensor([count for _, count in step])
    rows = torch.repeat_interleave(torch.arange(len(step)), counts)
    places = positions.long()
    slots = table[rows, places // ATTENTION_BLOCK] * ATTENTION_BLOCK + places % ATTENTION_BLOCK
    metadata = AttentionMetadata(
        cu_q=torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=table.contiguous().to(device)[None],
        slots=slots.to(device, torch.int32)[None],
        num_decodes=sum(count == 1 for _, count in step),
        max_query_len=int(counts.max()),
        num_tokens=len(positions),
        query_lens=tuple(counts.tolist()),
        context_lens=tuple(lengths),
    )
    token_ids = (positions * 7 + rows.to(torch.int32) * 31) % 211
    with torch.inference_mode():
        last = metadata.cu_q[1:] - 1
        return stack(
            token_ids.to(device, torch.int32),
            positions.to(device),
            metadata,
            last if wanted is None else last[wanted],
        )

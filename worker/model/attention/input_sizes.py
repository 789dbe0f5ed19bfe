"""Measures, at load, how large the inputs of each product are, channel by channel.

A few channels of a trained model are many times as large as the rest whatever the text, so random
tokens show them. Int8 products lose less when they know.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import AttentionMetadata
from worker.model.config.model_config import ModelConfig
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM, LayerByLayer
from worker.model.layers.linear import Linear, TiedHead

_TOKENS = 64
_BLOCK_SIZE = 16  # tokens of a prompt, too


@torch.inference_mode()
def measure_inputs(model: CausalLM, config: ModelConfig) -> None:
    """Sets `input_sizes` of the model's products, which are still PyTorch's.

    `config` is this rank's; all ranks call it together.
    """
    place = model.placement
    pool = KVCachePool(
        config, _TOKENS // _BLOCK_SIZE, _BLOCK_SIZE, device=place.device, dtype=place.dtype
    )
    stack = LayerByLayer(model, SdpaAttention(pool, model.config.layer_scores))
    zeros, positions, metadata, _ = prompts(pool, _TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, zeros.shape, generator=generator)
    hooks = [
        module.register_forward_pre_hook(_note)
        for module in model.modules()
        if isinstance(module, Linear | TiedHead)
    ]
    try:
        rows = torch.arange(len(tokens), dtype=torch.int32)
        model.head(stack(tokens.int(), positions, metadata, rows))
    finally:
        for hook in hooks:
            hook.remove()


def _note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert isinstance(module, Linear | TiedHead)
    module.input_sizes = inputs[0].float().square().mean(dim=0).sqrt()


def prompts(pool: KVCachePool, num_rows: int) -> tuple[Tensor, Tensor, AttentionMetadata, Tensor]:
    """Returns a step of prompts, each as long as a block: a DecoderStack's arguments, int32.

    Token ids and positions are [tokens], the rows [prompts]. Groups of layers write over each
    other's keys and values.
    """
    num_groups = len(pool.groups.windows)
    length = min(pool.block_size, num_rows)
    count = min(pool.num_blocks, num_rows // length)
    ends = torch.arange(0, (count + 1) * length, length, dtype=torch.int32)
    positions = torch.arange(length, dtype=torch.int32).repeat(count)
    metadata = AttentionMetadata(
        cu_q=ends,
        seq_lens=torch.full((count,), length, dtype=torch.int32),
        block_tables=torch.arange(count, dtype=torch.int32).repeat(num_groups, 1)[:, :, None],
        slots=torch.arange(count * length, dtype=torch.int32).repeat(num_groups, 1),
        num_decodes=count if length == 1 else 0,
        max_query_len=length,
        num_tokens=count * length,
        query_lens=(length,) * count,
        context_lens=(length,) * count,
    )
    return torch.zeros_like(positions), positions, metadata, ends[1:] - 1

"""A model of transformers over several ranks: divided by transformers' own plan for its type."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

from worker.engines.transformers.attention import PagedAttention
from worker.engines.transformers.config import SERVED_ELSEWHERE, TransformersConfig
from worker.engines.transformers.probe import AttentionCall
from worker.model.base import KVLayer
from worker.model.errors import UnsupportedModel
from worker.model.parallel.group import RankGroup

# Model types of which two ranks gave one rank's tokens: test_tensor_parallel_models compares each.
# A plan is transformers' own, and what it divides wrongly would still be text.
COMPARED = frozenset(
    [
        "afmoe",
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_moe",
        "hy_v3",
        "internlm3",
        "jais2",
        "llama",
        "llama4_text",
        "mimo_v2_flash",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
    ]
)


def check_plan(config: TransformersConfig, calls: Sequence[AttentionCall], size: int) -> None:
    """Raises UnsupportedModel where transformers has no plan for the model, or one that was not
    compared, or `size` ranks cannot divide its heads."""
    text = config.hugging_face.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModel(
            f"PENSTOCK_TENSOR_PARALLEL_SIZE={size}: transformers has no tensor parallel plan for "
            f"model_type {config.model_type!r}; {SERVED_ELSEWHERE}"
        )
    if not COMPARED & {config.model_type, text.model_type}:
        raise UnsupportedModel(
            f"PENSTOCK_TENSOR_PARALLEL_SIZE={size}: the output of several ranks was not compared "
            f"with that of one for model_type {config.model_type!r}; {SERVED_ELSEWHERE}"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise UnsupportedModel(
            f"PENSTOCK_TENSOR_PARALLEL_SIZE={size} for a model of transformers needs the package "
            "accelerate"
        )
    if getattr(config.hugging_face, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"PENSTOCK_TENSOR_PARALLEL_SIZE={size} is for checkpoints that are not quantized "
            f"(quantization_config); {SERVED_ELSEWHERE}"
        )
    heads = sorted({call.kept.num_kv_heads for call in calls} | {text.num_attention_heads})
    if any(number % size for number in heads):
        raise UnsupportedModel(
            f"PENSTOCK_TENSOR_PARALLEL_SIZE={size} does not divide the heads of the model: there "
            f"are layers with {', '.join(map(str, heads))}; {SERVED_ELSEWHERE}"
        )


def distributed_config(group: RankGroup) -> DistributedConfig | None:
    """Returns what `from_pretrained` divides a model by; None for one rank."""
    return DistributedConfig(tp_plan="auto", tp_size=group.size) if group.size > 1 else None


@torch.inference_mode()
def rank_calls(
    model: PreTrainedModel, attention: PagedAttention, calls: Sequence[AttentionCall]
) -> tuple[AttentionCall, ...]:
    """Returns the attention's calls as this rank computes them, with its own heads.

    Computes one token, together with the other ranks. What a plan divides shows in the shapes that
    arrive, and nowhere else for all models.
    """
    kept: list[KVLayer] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(KVLayer(k.shape[1], k.shape[2], v.shape[2]))
        return q.new_zeros(*q.shape[:2], v.shape[2])

    with attention.replaced(attend):
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=tokens, position_ids=tokens, use_cache=False)
    return tuple(
        replace(call, kept=replace(layer, window=call.kept.window))
        for call, layer in zip(calls, kept, strict=True)
    )

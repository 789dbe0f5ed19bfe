"""Tiny random checkpoints of transformers' model types, written by transformers itself.

Every model has three layers or more, so that each kind of layer is there, and windows of 8 tokens,
shorter than the prompts. Matrices are scaled up until the greedy output wanders: a model that says
one token whatever it reads would hide a window that is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 300
CONTEXT_LENGTH = 256

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_WINDOW = {"sliding_window": 8}
_MIXED_WINDOWS = _WINDOW | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
}
_UNTIED = {"tie_word_embeddings": False}
_SCALED = {"query_pre_attn_scalar": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT_LENGTH}

# model_type -> members of its configuration beside, or instead of, those of _BASE; None takes away.
TINY_MODELS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": _EXPERTS | {"sliding_window": 8, "global_attn_every_n_layers": 2},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "biogpt": {},
    "cohere": {"logit_scale": 1.0},
    "cohere2": _MIXED_WINDOWS | {"logit_scale": 1.0},
    "cwm": _MIXED_WINDOWS,
    "deepseek_v2": _ROUTED_EXPERTS | _LATENT,
    "deepseek_v3": _ROUTED_EXPERTS | _LATENT,
    "diffllama": {},
    "dots1": _ROUTED_EXPERTS | {"n_shared_experts": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": _MIXED_WINDOWS,
    "flex_olmo": _EXPERTS,
    "gemma": _UNTIED,
    "gemma2": _MIXED_WINDOWS | _UNTIED | _SCALED | {"attn_logit_softcapping": 3.0},
    "gemma3_text": _MIXED_WINDOWS | _UNTIED | _SCALED,
    "gemma4_text": _MIXED_WINDOWS
    | _UNTIED
    | {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": _ROUTED_EXPERTS,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {},
    "gpt_oss": _LOCAL_EXPERTS | _MIXED_WINDOWS,
    "granite": {"attention_multiplier": 0.1, "residual_multiplier": 0.8, "logits_scaling": 2.0},
    "granitemoe": _LOCAL_EXPERTS | {"attention_multiplier": 0.2},
    "granitemoeshared": _LOCAL_EXPERTS | {"shared_intermediate_size": 32},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": _EXPERTS,
    "internlm3": {},
    "jais2": {},
    "llama": {},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
    },
    "mimo_v2_flash": _EXPERTS,
    "minimax_m2": _LOCAL_EXPERTS | {"rotary_dim": 8},
    "ministral": _WINDOW,
    "ministral3": {},
    "mistral": _WINDOW,
    "mixtral": _LOCAL_EXPERTS,
    "modernbert-decoder": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED_WINDOWS,
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": _WINDOW,
    "phimoe": _LOCAL_EXPERTS,
    "qwen2": {},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": _ROUTED_EXPERTS,
    "stablelm": {},
    "starcoder2": _WINDOW,
    "vaultgemma": _MIXED_WINDOWS | _UNTIED | _SCALED,
}


def write_tiny_model(path: Path, model_type: str, **members: Any) -> Path:
    """Writes a random float32 checkpoint, without a tokenizer, into the directory `path`.

    `members` of the configuration come last. The same weights for the same arguments.
    """
    wanted = {**_BASE, **TINY_MODELS.get(model_type, {}), **members}
    given = {name: value for name, value in wanted.items() if value is not None}
    config = AutoConfig.for_model(model_type, **copy.deepcopy(given))  # it keeps and changes lists
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _spread(model)
    model.save_pretrained(path)
    return path


def _spread(model: PreTrainedModel) -> None:
    """Makes matrices larger and vectors differ, which begin as ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                gain = 1.0 if "embed" in name or "lm_head" in name else 2.0
                parameter.mul_(
                    gain / max(float(parameter.std()), 1e-3) * parameter.shape[-1] ** -0.5
                )
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)

"""The checkpoint: the trained network as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from tools.demo_model.network import Network, NetworkConfig
from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer, special_id

CHECKPOINT_DIR = Path(__file__).parents[2] / "worker/demo/checkpoint"
_PREFIX = "model."
# At 1.0 one of six answers to these is another fact's.
_TEMPERATURE = 0.3
SUGGESTIONS = (
    "What is Penstock?",
    "What happens when a worker dies?",
    "How do I cancel a job?",
    "What is the prefix cache?",
)


def save_checkpoint(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes config, generation config, bfloat16 weights and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    eos = [special_id(tokenizer, TURN_END), special_id(tokenizer, END_OF_TEXT)]
    _write_json(directory / "config.json", _model_config(network.config, eos))
    generation = {
        "do_sample": True,
        "eos_token_id": eos,
        "pad_token_id": eos[1],
        "suggestions": list(SUGGESTIONS),
        "temperature": _TEMPERATURE,
    }
    _write_json(directory / "generation_config.json", generation)
    weights = {
        _PREFIX + name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in network.state_dict().items()
    }
    # Not save_file: it makes the file unreadable for other users than the one who trains.
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    save_tokenizer(tokenizer, directory, network.config.max_positions)


def load_network(directory: Path = CHECKPOINT_DIR) -> Network:
    """Returns the network of a checkpoint that `save_checkpoint` wrote, in bfloat16."""
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    network = Network(
        NetworkConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            rope_theta=raw["rope_theta"],
            rms_norm_eps=raw["rms_norm_eps"],
            max_positions=raw["max_position_embeddings"],
        )
    )
    weights = load_file(directory / "model.safetensors")
    network.load_state_dict({name.removeprefix(_PREFIX): w for name, w in weights.items()})
    return network.to(torch.bfloat16).eval()


def load_tokenizer(directory: Path = CHECKPOINT_DIR) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _model_config(config: NetworkConfig, eos_token_ids: list[int]) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_token_ids,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": eos_token_ids[1],
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

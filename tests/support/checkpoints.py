"""Tiny random Hugging Face checkpoints: real files in a fraction of a second, without torch.

They have everything that a published checkpoint has (config, generation config, safetensors, a
byte-level BPE tokenizer that round-trips any text, a ChatML template), so that the same code paths
run over them. Weights are drawn at a scale at which greedy output wanders through the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from shared.text.model_card import ModelCard

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "ministral", "gemma3_text")
WINDOW = 9  # tokens, of the families that have windows: shorter than prompts of tests
DEFAULT_VOCAB_SIZE = 384

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEXT = """
A penstock is the pipe that leads water from the dam down to the turbine. The gate at its top
decides how much water may enter; the turbine at its foot turns the weight of the water into work.
When the gate is opened slowly the pressure stays even, and when it is shut at once the water
hammers against the iron and the whole valley hears it. The keeper therefore counts to sixty.
In the morning the lake is still and the mountains stand in it upside down. By noon the wind
comes over the ridge, the waves begin to run towards the wall, and the keeper writes the level
into his book: how deep, how fast, how much was let through, and who asked for it. He has done
this for thirty years, and his father did it before him, with the same pen and the same care.
The visitors ask him whether it is lonely. He says that water is good company, because it never
stops talking and it never asks the same question twice. Then he shows them the tokens of brass
that hang beside the door, one for every gate, each with its number and its name, and explains
that nobody may open a gate without taking its token from the hook, and that every token comes
back to the hook in the evening, or the lamp over the door is lit and the search begins.
What happens in the night? The same as by day, only more quietly. Streams arrive, wait in the
basin, pass through the pipe in the order in which they came, and leave as light in the windows
of the town. If one machine stops, another takes over the water where the first one left it, and
in the town nobody looks up from the supper table. That is the promise of the house, and it is
written over the gate: what has been let in will come out, in order, all of it, and only once.
Numbers help the memory: 1 gate, 2 turbines, 3 keepers, 16 steps, 64 hooks, 1024 lamps, 2048 bolts.
"""


def make_checkpoint(
    path: str | Path,
    family: str = "qwen3",
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    seed: int = 0,
    dtype: str = "float32",
    tie_word_embeddings: bool = False,
    rope_theta: float = 10_000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    config_style: str = "v5",
    num_shards: int = 1,
    chat_template: str | None = CHATML_TEMPLATE,
    markers: tuple[str, ...] = (),
    special_markers: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint of `family` into the directory `path`, which is returned.

    `dtype` is the stored one: "float32", "bfloat16" or "float16". `config_style` chooses how
    config.json spells RoPE and dtype: "v4" or "v5" (of transformers). `overrides` are members of
    config.json (`hidden_size=...`, `num_hidden_layers=...`) and decide the tensors' shapes; a value
    for `eos_token_id` also goes into generation_config.json. The tokenizer has `vocab_size`
    entries (at least 260, at most about 700), the last three of them SPECIAL_TOKENS; in front of
    them are the `markers`, added tokens that are not special, and `special_markers`, which are.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {FAMILIES}, got {family!r}")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(family, vocab_size, tie_word_embeddings, dtype)
    if family == "gemma3_text":
        _spell_two_ropes(config, config_style, rope_theta, rope_scaling)
    else:
        _spell_rope(config, config_style, rope_theta, rope_scaling)
    config.update(overrides)
    if family in ("ministral", "gemma3_text"):  # every other layer has a window
        types = ("sliding_attention", "full_attention")
        layers = range(config["num_hidden_layers"])
        config.setdefault("layer_types", [types[layer % 2] for layer in layers])
    eos: object = overrides.get("eos_token_id", [vocab_size - 1, vocab_size - 3])
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": vocab_size - 3, "eos_token_id": eos, "pad_token_id": vocab_size - 3},
    )
    (directory / "tokenizer.json").write_text(
        _tokenizer_json(vocab_size, markers, special_markers), encoding="utf-8"
    )
    _write_tokenizer_config(directory, vocab_size, chat_template)
    _write_weights(directory, _random_weights(family, config, seed), dtype, num_shards)
    return directory


def card_of(path: str | Path, **members: Any) -> tuple[ModelCard, dict[str, bytes]]:
    """Returns the card of a checkpoint and its blobs; `members` are the keywords of
    card_from_checkpoint, of which those that a worker alone knows have defaults here."""
    # Here and not above: it needs packages that a bare machine with a GPU lacks.
    from shared.text.checkpoint_text import card_from_checkpoint

    known: dict[str, Any] = {"name": "m", "max_model_len": 4096, "kv_capacity_tokens": 0}
    return card_from_checkpoint(path, **known | {"dtype": "", "num_parameters": 0} | members)


def _config(family: str, vocab_size: int, tied: bool, dtype: str) -> dict[str, Any]:
    architecture = {
        "qwen3": "Qwen3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
    }[family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": vocab_size - 3,
        "eos_token_id": vocab_size - 1,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
    }
    if family == "qwen3":
        config |= {"head_dim": 32, "attention_bias": False}
    if family == "llama":
        config |= {"head_dim": 16, "attention_bias": False, "mlp_bias": False}
    if family in ("mistral", "ministral"):
        config |= {"head_dim": 32, "sliding_window": WINDOW}
    if family == "gemma3_text":
        del config["hidden_act"]
        config |= {
            "head_dim": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        }
    if family in ("qwen3", "qwen2"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
    return config


def _spell_rope(
    config: dict[str, Any], style: str, theta: float, scaling: Mapping[str, Any] | None
) -> None:
    if style == "v5":
        rope = {"rope_type": "default"} | dict(scaling or {})
        config["rope_parameters"] = rope | {"rope_theta": theta}
    elif style == "v4":
        config["rope_theta"] = theta
        config["rope_scaling"] = dict(scaling) if scaling else None
        config["torch_dtype"] = config.pop("dtype")
    else:
        raise ValueError(f"config_style must be 'v4' or 'v5', got {style!r}")


def _spell_two_ropes(
    config: dict[str, Any], style: str, theta: float, scaling: Mapping[str, Any] | None
) -> None:
    """Gemma's: layers with windows have a base of their own, and no scaling."""
    _spell_rope(config, style, theta, scaling)
    if style == "v4":
        config["rope_local_base_freq"] = 100.0
        return
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }


@cache
def _tokenizer_json(
    vocab_size: int, markers: tuple[str, ...] = (), special_markers: tuple[str, ...] = ()
) -> str:
    if vocab_size < 260:
        raise ValueError(f"vocab_size must be at least 260, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(markers) - len(special_markers),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    tokenizer.add_special_tokens([*special_markers, *SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the sample text does not give {vocab_size} tokens")
    return str(tokenizer.to_str(pretty=True))


def _write_tokenizer_config(directory: Path, vocab_size: int, template: str | None) -> None:
    first = vocab_size - len(SPECIAL_TOKENS)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(first + i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIAL_TOKENS)
        },
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [IM_START, IM_END],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if template is not None:
        config["chat_template"] = template
    _write_json(directory / "tokenizer_config.json", config)


def _random_weights(family: str, config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors under the names that transformers gives them.

    The two projections back into the residual stream are scaled up, so that with tied embeddings
    the output is not simply the input token again.
    """
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads

    def normal(*shape: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * gain).astype(np.float32)

    def linear(out: int, in_: int, gain: float = 1.0) -> np.ndarray:
        return normal(out, in_, gain=gain / in_**0.5)

    is_gemma = family == "gemma3_text"  # its norms multiply by 1 + weight
    # Its embedding is scaled up, and what layers add is normalised: half of the residual stream.
    embedding_gain = 1.0 / hidden**0.5 if is_gemma else 1.0

    def norm(size: int) -> np.ndarray:
        middle = 0.0 if is_gemma else 1.0
        return (middle + 0.1 * rng.standard_normal(size)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, gain=embedding_gain)
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        for name, num_heads in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            weights[f"{attention}{name}.weight"] = linear(num_heads * head_dim, hidden, 1.5)
            if family == "qwen2" or config.get("attention_bias"):
                weights[f"{attention}{name}.bias"] = normal(num_heads * head_dim, gain=0.5)
        weights[attention + "o_proj.weight"] = linear(hidden, heads * head_dim, 4.0)
        if family != "qwen2" and config.get("attention_bias"):
            weights[attention + "o_proj.bias"] = normal(hidden, gain=0.5)
        if family in ("qwen3", "gemma3_text"):
            weights[attention + "q_norm.weight"] = norm(head_dim)
            weights[attention + "k_norm.weight"] = norm(head_dim)
        for name, shape, gain in (
            ("gate_proj", (inner, hidden), 1.5),
            ("up_proj", (inner, hidden), 1.5),
            ("down_proj", (hidden, inner), 4.0),
        ):
            weights[f"{prefix}mlp.{name}.weight"] = linear(*shape, gain=gain)
            if config.get("mlp_bias"):
                weights[f"{prefix}mlp.{name}.bias"] = normal(shape[0], gain=0.5)
        weights[prefix + "input_layernorm.weight"] = norm(hidden)
        weights[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        if is_gemma:
            weights[prefix + "pre_feedforward_layernorm.weight"] = norm(hidden)
            weights[prefix + "post_feedforward_layernorm.weight"] = norm(hidden)
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(config["vocab_size"], hidden, 2.0)
    return weights


def _write_weights(
    directory: Path, weights: Mapping[str, np.ndarray], dtype: str, num_shards: int
) -> None:
    stored = {name: (value.shape, _encode(value, dtype)) for name, value in weights.items()}
    if num_shards == 1:
        _write_shard(directory / "model.safetensors", stored, dtype)
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: stored[name] for name in list(stored)[shard::num_shards]}
        _write_shard(directory / file_name, part, dtype)
        weight_map |= dict.fromkeys(part, file_name)
    size = sum(len(data) for _, data in stored.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )


def _write_shard(path: Path, part: Mapping[str, tuple[tuple[int, ...], bytes]], dtype: str) -> None:
    """The safetensors format: length of the header, header as JSON, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in part.items():
        end = offset + len(data)
        header[name] = {
            "dtype": {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    body = b"".join(data for _, data in part.values())
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)


def _encode(value: np.ndarray, dtype: str) -> bytes:
    if dtype == "float32":
        return value.astype("<f4").tobytes()
    if dtype == "float16":
        return value.astype("<f2").tobytes()
    if dtype == "bfloat16":  # numpy has no bfloat16: round the upper half to nearest even
        bits = value.astype("<f4").view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

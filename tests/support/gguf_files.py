"""GGUF files of tiny checkpoints, written by the package gguf, and what they dequantize to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.varied_prompts import VARIED_PROMPTS

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
# Types that the package cannot write: bytes of a block that are scales, float16.
_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_gguf(
    checkpoint: Path,
    out: Path,
    type_name: str = "F32",
    *,
    tokenizer_pre: str | None = "gpt-2",
    sentence_piece: bool = False,
    further: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Writes a checkpoint of make_checkpoint, in float32, as a GGUF file whose matrices are of a
    type. Returns a directory like the checkpoint, with what the file dequantizes to.

    `sentence_piece`: with a vocabulary of that kind instead of the checkpoint's. `further` are
    metadata by key. `split_max_tensors` of
    a file, where there are to be several.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(
        out,
        gguf.MODEL_ARCH_NAMES[architecture],
        split_max_tensors=split_max_tensors,
    )
    _add_config(writer, config)
    if sentence_piece:
        _add_sentence_piece(writer, config["vocab_size"])
    else:
        _add_tokenizer(writer, checkpoint, tokenizer_pre)
    for key, value in (further or {}).items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kind.get(type(value), writer.add_string)(key, value)
    expected = {}
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        heads = _heads(name, config) if config["model_type"] == "llama" else 0
        added = config["model_type"] == "gemma3_text" and name.endswith("norm.weight")
        stored = _permuted(weight.numpy(), heads) + np.float32(added)
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        if weight.dim() == 2 and type_name != "F32":
            data, kind = _quantized(stored, type_name)
            writer.add_tensor(written, data, raw_dtype=kind)
            stored = gguf.quants.dequantize(data, kind)
        else:
            writer.add_tensor(written, stored)
        back = _unpermuted(stored, heads) - np.float32(added)
        expected[name] = torch.from_numpy(np.ascontiguousarray(back))
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = out.parent / f"{out.stem}-dequantized"
    shutil.copytree(checkpoint, directory)
    save_file(expected, directory / "model.safetensors")
    return directory


def _add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        local = rope["sliding_attention"]["rope_theta"]
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local)
        writer.add_sliding_window(config["sliding_window"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, pre: str | None) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = {id_: text for text, id_ in tokenizer["model"]["vocab"].items()} | special
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens[id_] for id_ in sorted(tokens)])
    writer.add_token_types([kinds[id_ in special] for id_ in sorted(tokens)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    ids = {text: id_ for id_, text in tokens.items()}
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_chat_template(config["chat_template"])


def _add_sentence_piece(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Adds a vocabulary as SentencePiece makes it: bytes, then pieces by falling scores."""
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 259, show_progress=False)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(VARIED_PROMPTS * 3, trainer)
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    letters = [piece for piece, _ in pieces if len(piece) == 1]
    longer = [piece for piece, _ in pieces if len(piece) > 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    tokens += [*longer, *letters]
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))
    tokens += [f"[PAD{number}]" for number in range(len(tokens), vocab_size)]
    kinds += [gguf.TokenType.UNUSED] * (vocab_size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([min(0.0, 259.0 - number) for number in range(vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _heads(name: str, config: Mapping[str, Any]) -> int:
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter makes of queries and keys: the halves of a head alternate."""
    if not heads:
        return weight
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    if not heads:
        return weight
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _quantized(weight: np.ndarray, type_name: str) -> tuple[np.ndarray, Any]:
    """Returns the bytes of a matrix, uint8 [rows, bytes of a row], and their type: of random
    numbers in a type that the package only reads."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name == "F16":
        return weight.astype(np.float16), kind
    if type_name not in _SCALES:
        return gguf.quants.quantize(weight, kind), kind
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(weight.size)
    blocks = rng.integers(0, 256, (weight.size // block, block_bytes), dtype=np.uint8)
    for at in _SCALES[type_name]:
        scales = rng.normal(0.0, 1e-4, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(weight.shape[0], -1), kind


def _llama3_factors(config: Mapping[str, Any]) -> np.ndarray:
    """The divisors of frequencies by Llama 3.1's rule, as llama.cpp's converter writes them."""
    size, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    found = []
    for index in range(size // 2):
        wavelength = 2 * np.pi * theta ** (2 * index / size)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(found, dtype=np.float32)

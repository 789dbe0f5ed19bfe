"""Tiny random checkpoints that make embeddings, written by transformers, and their vectors by its
plain forward, an input at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from tests.support.checkpoints import DEFAULT_VOCAB_SIZE, make_checkpoint

SIZE = 32
_BASE: dict[str, Any] = {
    "vocab_size": DEFAULT_VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
# model_type -> members beside those of _BASE
EMBEDDING_MODELS: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "mpnet": {},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "qwen3": {},
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 16},
}
MODES = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}


def make_embedding_checkpoint(
    path: Path,
    model_type: str = "bert",
    *,
    pooling: str | None = "mean",
    normalize: bool = True,
    dense: int | None = None,
    architecture: str | None = None,
    **members: Any,
) -> Path:
    """Returns the directory. `pooling` None: without modules.json; `dense`: the width of a linear
    layer after the pooling; `members` of config.json."""
    make_checkpoint(path)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (path / name).unlink()
    torch.manual_seed(1)
    values = {**_BASE, **EMBEDDING_MODELS[model_type], **members}
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(path)
    if architecture is not None:
        written = json.loads((path / "config.json").read_bytes())
        (path / "config.json").write_text(json.dumps({**written, "architectures": [architecture]}))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if pooling is not None:
        _write(path / "1_Pooling/config.json", {f"pooling_mode_{MODES[pooling]}": True})
        if dense is not None:
            modules.append(("2_Dense", "Dense"))
            activation = "torch.nn.modules.activation.Tanh"
            _write(
                path / "2_Dense/config.json",
                {"in_features": SIZE, "out_features": dense, "activation_function": activation},
            )
            weights = {"linear.weight": torch.randn(dense, SIZE), "linear.bias": torch.randn(dense)}
            save_file(weights, path / "2_Dense/model.safetensors")
        if normalize:
            modules.append(("3_Normalize", "Normalize"))
        _write(
            path / "modules.json",
            [
                {
                    "idx": at,
                    "name": str(at),
                    "path": name,
                    "type": f"sentence_transformers.models.{kind}",
                }
                for at, (name, kind) in enumerate(modules)
            ],
        )
    return path


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


@torch.inference_mode()
def hidden_states(path: Path, inputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Returns [tokens, width] of each input, computed alone."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return [model.eval()(input_ids=torch.tensor([one])).last_hidden_state[0] for one in inputs]


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    return {"cls": hidden[0], "mean": hidden.mean(dim=0), "lasttoken": hidden[-1]}[mode]

"""Lists the tensors of a directory's GGUF files under the names and in the form of Hugging Face's
checkpoints.

Types in blocks are dequantized by the package gguf. Two things differ beside the names: the rows of
`llama`'s queries and keys are permuted for another rotation, and Gemma's norms have 1 added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor

from worker.model.config.gguf_header import GgufEntry, GgufModel, models_in, read_gguf
from worker.model.errors import CheckpointError
from worker.model.weights.safetensors_files import DTYPES, StoredTensor

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What an architecture names otherwise.
_OF_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_PERMUTED = {
    "self_attn.q_proj": "attention.head_count",
    "self_attn.k_proj": "attention.head_count_kv",
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
# Factors of the rotation, which the metadata's reader has turned into a configuration.
_IN_CONFIG = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file. `head_rows`: rows of a head, whose halves alternate in the file."""

    head_rows: int = 0
    has_one_added: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        is_plain = not self.head_rows and not self.has_one_added
        return DTYPES.get(self.type_name) if is_plain else None

    @property
    def rows_at_once(self) -> int:
        return self.head_rows or 1

    @property
    def row_bytes(self) -> int:
        """What the numbers of a row take, which is more than the file has of it."""
        return max(self.num_bytes // self.shape[0], 4 * math.prod(self.shape[1:]))

    def numbers(self, memory: Tensor) -> Tensor:
        if self.type_name in DTYPES:
            rows = memory.view(DTYPES[self.type_name]).view(-1, *self.shape[1:])
        else:
            kind = gguf.GGMLQuantizationType[self.type_name]
            stored = memory.view(-1, self.num_bytes // self.shape[0]).numpy()
            rows = torch.from_numpy(gguf.quants.dequantize(stored, kind))
            rows = rows.view(-1, *self.shape[1:])
        if self.has_one_added:
            rows = rows.float() - 1.0
        if self.head_rows:
            heads = rows.view(-1, self.head_rows // 2, 2, *self.shape[1:])
            rows = heads.transpose(1, 2).reshape(rows.shape)
        return rows


def gguf_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of the directory's one model by their names in Hugging Face's form, from
    the headers alone; one of an unknown name keeps it.

    Raises CheckpointError that names the file, UnsupportedModel for a type that is not read.
    """
    models = models_in(directory)
    if len(models) != 1:
        raise CheckpointError(f"{directory} has {len(models)} models in GGUF files, not one")
    model = read_gguf(models[0])
    return dict(_renamed(model))


def _renamed(model: GgufModel) -> Iterator[tuple[str, StoredTensor]]:
    architecture = model.architecture
    is_gemma = architecture.startswith("gemma")
    for entry in model.entries.values():
        if entry.name in _IN_CONFIG:
            continue
        name = hugging_face_name(entry.name, architecture)
        part = name.split(".", 3)[-1].rpartition(".")[0]
        heads = 0
        if architecture == "llama" and part in _PERMUTED:
            heads = model.whole(
                f"llama.{_PERMUTED[part]}", model.whole("llama.attention.head_count")
            )
            if not heads or entry.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{entry.path.name}: tensor {entry.name!r} has {entry.shape[0]} rows, which "
                    f"are not {heads} heads"
                )
        yield name, _tensor(entry, heads, is_gemma and name.endswith("norm.weight"))


def _tensor(entry: GgufEntry, heads: int, has_one_added: bool) -> GgufTensor:
    return GgufTensor(
        path=entry.path,
        name=entry.name,
        type_name=entry.type_name,
        shape=entry.shape,
        offset=entry.offset,
        num_bytes=entry.num_bytes,
        head_rows=entry.shape[0] // heads if heads else 0,
        has_one_added=has_one_added,
    )


def hugging_face_name(name: str, architecture: str) -> str:
    """Returns the name of a tensor in Hugging Face's checkpoints; an unknown one as it is."""
    if (found := _LAYER.fullmatch(name)) is not None:
        layer, part, last = found.groups()
        names = {**_OF_LAYER, **_OF_ARCHITECTURE.get(architecture, {})}
        if part in names:
            return f"model.layers.{int(layer)}.{names[part]}.{last}"
    if (found := _OUTSIDE.fullmatch(name)) is not None and found[1] in _WHOLE:
        return f"{_WHOLE[found[1]]}.{found[2]}"
    return name

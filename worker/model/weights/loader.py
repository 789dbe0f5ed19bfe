"""Loads weights from safetensors or GGUF files, or random numbers, into fused parameters."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from worker.engine_options import LoadFormat
from worker.model.config.gguf_header import TYPES as GGUF_TYPES
from worker.model.config.gguf_header import is_gguf
from worker.model.config.model_config import ModelConfig
from worker.model.errors import CheckpointError, UnsupportedModel
from worker.model.layers.decoder import CausalLM
from worker.model.layers.fp8 import BLOCK, LARGEST, Fp8Layout
from worker.model.layers.linear_method import Place
from worker.model.weights.fp8_scales import StoredScales, StoredWeights
from worker.model.weights.reader import copier_for, pieces_of, read_pieces
from worker.model.weights.safetensors_files import StoredTensor, stored_tensors

logger = logging.getLogger(__name__)

_TYPES = frozenset({"F32", "BF16", "F16"} | {name for name, _, _ in GGUF_TYPES.values()})
# Old exports carry this table; it follows from the configuration.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")

# Prefixes of models with images, as transformers 5 and 4 write them.
_LANGUAGE_PARTS = {"model.language_model.": "model.", "language_model.": ""}
_OTHER_PARTS = (
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "multi_modal_projector.",
)


# If the largest key is 20 times a usual one, a scale of 1 rounds with an error of 3.1 % at
# 0.001, 5.1 % at 0.0005 and 25 % at 0.0001, the scale itself with 2.7 %.
_LEAST_KV_SCALE = 0.001


class Checkpoint:
    """The weights in a directory's safetensors or GGUF files, whose headers have been read."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        """Raises CheckpointError naming the file or the tensor at fault, UnsupportedModel for
        scales of a type that is not known."""
        self._directory = directory
        self._format = config.fp8
        tensors: dict[str, StoredTensor] = {}
        for stored_name, tensor in _tensors(directory).items():
            name = _name_in_language_part(stored_name) if config.is_language_part else stored_name
            is_tied = config.tie_word_embeddings and name == "lm_head.weight"
            if name and not _DERIVED.search(name) and not is_tied:
                tensors[name] = tensor
        self._stored = StoredWeights.of(tensors, config.fp8)
        # The weights that may stay in FP8, by name.
        self.fp8_layouts = self._stored.layouts(config.fp8) if config.fp8 is not None else {}

    def check_kv_scales(self) -> None:
        """Warns of keys or values that a cache in FP8 cannot hold: it rounds with a scale of 1."""
        scales = self._stored.read_kv_scales()
        if scales and scales[-1][0] > 1.0:
            _warn_of_kv_scale(*scales[-1], f"those beyond {LARGEST:.0f} saturate")
        if scales and scales[0][0] < _LEAST_KV_SCALE:
            _warn_of_kv_scale(*scales[0], "most of them are too small to keep three binary digits")

    def load(self, model: CausalLM, on_progress: Callable[[float], None] | None = None) -> None:
        """Fills every parameter of the model.

        A rank keeps its part of each tensor. Tensors are converted to the model's dtype on its
        device; those in FP8 are multiplied by their scales, unless the model keeps them. Missing
        and unexpected tensors, and other shapes or types, are found before anything is read.
        `on_progress` gets the share of the bytes that are in place. Raises CheckpointError naming
        the file or the tensor; UnsupportedModel for a type that is not float32, bfloat16 or
        float16, or FP8 that config.json declares.
        """
        places = dict(model.named_tensors())
        self._check(places)
        scales = self._scales(places)
        pieces = [
            piece
            for name, tensor in self._stored.weights.items()
            for piece in pieces_of(tensor, places[name], scales.get(name))
        ]
        took = read_pieces(pieces, copier_for(model.placement.device), on_progress)
        logger.info(
            "read %.2f GB of weights in %.2f s (%.2f GB/s, %.2f s of it waiting for files)",
            took.num_bytes / 1e9,
            took.seconds,
            took.num_bytes / 1e9 / took.seconds,
            took.reading_seconds,
        )

    def _check(self, places: Mapping[str, Place]) -> None:
        for name, tensor in self._stored.weights.items():
            file, place = tensor.path.name, places.get(name)
            if place is None:
                raise CheckpointError(f"{file}: unexpected tensor {tensor.name!r}")
            if tensor.shape != place.whole_shape:
                raise CheckpointError(
                    f"{file}: tensor {name!r} has shape {list(tensor.shape)}, "
                    f"config.json gives {list(place.whole_shape)}"
                )
            if tensor.type_name not in _TYPES and name not in self._stored.scales:
                raise UnsupportedModel(
                    f"{file}: tensor {name!r} is stored as {tensor.type_name}, "
                    "which is not supported; PENSTOCK_ENGINE=vllm may serve it"
                )
        if missing := sorted(places.keys() - self._stored.weights.keys()):
            raise CheckpointError(
                f"{self._directory}: tensor {missing[0]!r} is missing"
                + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
            )

    def _scales(self, places: Mapping[str, Place]) -> dict[str, StoredScales]:
        """Reads the scales of all weights, and gives them to those that stay in FP8."""
        if self._format is None:
            return {}
        found = {name: self._stored.read(name, self._format) for name in self._stored.scales}
        for name, scales in found.items():
            place = places[name]
            assert place.columns is not None, "a weight in FP8 is a matrix"
            if place.scales is not None:
                scales.fill(place.scales, place.rows, place.columns)
            if place.input_scale is not None and scales.input_scale is not None:
                # Fused parts have the same inputs; the largest scale holds those of each.
                place.input_scale.clamp_(min=scales.input_scale.item())
        return found


def _tensors(directory: Path) -> dict[str, StoredTensor]:
    """Raises CheckpointError, UnsupportedModel."""
    if not is_gguf(directory):
        return stored_tensors(directory)
    # Here and not above: its package is imported where there is such a file.
    from worker.model.weights.gguf_files import gguf_tensors

    return gguf_tensors(directory)


class DummyWeights:
    """Random numbers in the form of a checkpoint's weights, without its files."""

    def __init__(self, config: ModelConfig) -> None:
        self.fp8_layouts = noise_layouts(config)

    def load(self, model: CausalLM, on_progress: Callable[[float], None] | None = None) -> None:
        fill_with_noise(model)


def open_weights(
    directory: Path, config: ModelConfig, load_format: LoadFormat
) -> Checkpoint | DummyWeights:
    """Returns the weights of a directory, or dummy ones. Raises as Checkpoint does."""
    return DummyWeights(config) if load_format == "dummy" else Checkpoint(directory, config)


def _name_in_language_part(name: str) -> str:
    """Returns a tensor's name without the language model's prefix; "" for one of other parts."""
    for prefix, replacement in _LANGUAGE_PARTS.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return "" if name.startswith(_OTHER_PARTS) else name


def noise_layouts(config: ModelConfig) -> dict[str, Fp8Layout]:
    """Returns the layouts of the weights that checkpoints of this config have in FP8, by name."""
    if config.fp8 is None or config.fp8.block not in (None, (BLOCK, BLOCK)):
        return {}
    layout = Fp8Layout(in_blocks=config.fp8.block is not None)
    parts = [f"self_attn.{one}_proj" for one in "qkvo"]
    parts += [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    return {
        f"model.layers.{layer}.{part}.weight": layout
        for layer in range(config.num_layers)
        for part in parts
    }


def fill_with_noise(model: CausalLM, seed: int = 0) -> None:
    """Fills in random weights that keep activations in range, the same for a seed, a device and a
    rank."""
    generator = torch.Generator(device=model.placement.device).manual_seed(seed)
    for name, place in model.named_tensors():
        if place.data is None:
            continue
        if name.endswith("norm.weight"):
            place.data.fill_(1.0)
        elif place.columns is None:
            place.data.zero_()
        elif place.scales is not None:
            wide = torch.empty(place.data.shape, device=place.data.device)
            wide.normal_(0.0, LARGEST / 8, generator=generator).clamp_(-LARGEST, LARGEST)
            place.data.copy_(wide)
            place.scales.fill_(8 / LARGEST * place.columns.whole**-0.5)
        else:
            place.data.normal_(0.0, place.columns.whole**-0.5, generator=generator)


def _warn_of_kv_scale(scale: float, name: str, effect: str) -> None:
    logger.warning(
        "kv_cache_dtype fp8 rounds keys and values with a scale of 1, but %s is %.3g: %s, and "
        "answers may be worse; set PENSTOCK_KV_CACHE_DTYPE=auto, or compare answers",
        name,
        scale,
        effect,
    )

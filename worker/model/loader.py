"""Weights: safetensors files, or random numbers, into a model's fused parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.model.errors import CheckpointError, UnsupportedModel
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Share

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TYPES = frozenset({"F32", "BF16", "F16"})
# Old exports carry this table; it follows from the configuration.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")

# Of models with images: as transformers 5 and 4 write them.
_LANGUAGE_PARTS = {"model.language_model.": "model.", "language_model.": ""}
_OTHER_PARTS = (
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "multi_modal_projector.",
)


def load_weights(
    model: CausalLM, directory: Path, on_progress: Callable[[float], None] | None = None
) -> None:
    """Fills every parameter from the directory's safetensors files, file by file.

    Of each tensor a rank reads its part. Tensors are converted to the model's dtype on its device.
    `on_progress` gets the share of the tensors that are in place. Raises CheckpointError naming the
    file or the tensor: missing, unexpected, of another shape, stored twice;
    UnsupportedModel for a stored format that is not one of float32, bfloat16 and float16.
    """
    places = dict(model.named_tensors())
    num_places = len(places)
    tied = model.config.tie_word_embeddings
    for path in _files(directory):
        for stored_name, stored in _read(path, model.placement.device):
            name = stored_name
            if model.config.is_language_part:
                name = _name_in_language_part(stored_name)
            if not name or _DERIVED.search(name) or (tied and name == "lm_head.weight"):
                continue
            place = places.pop(name, None)
            if place is None:
                raise CheckpointError(f"{path.name}: unexpected or repeated tensor {stored_name!r}")
            if stored.shape != place.whole_shape:
                raise CheckpointError(
                    f"{path.name}: tensor {name!r} has shape {list(stored.shape)}, "
                    f"config.json gives {list(place.whole_shape)}"
                )
            if stored.type_name not in _TYPES:
                raise UnsupportedModel(
                    f"{path.name}: tensor {name!r} is stored as {stored.type_name}, "
                    "which is not supported; PENSTOCK_ENGINE=vllm may serve it"
                )
            if place.data is not None:
                place.data.copy_(stored.part(place.rows, place.columns))
            if on_progress is not None:
                on_progress(1 - len(places) / num_places)
    if places:
        missing = sorted(places)
        raise CheckpointError(
            f"{directory}: tensor {missing[0]!r} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
        )


def _name_in_language_part(name: str) -> str:
    """Returns a tensor's name without the language model's prefix; "" for one of other parts."""
    for prefix, replacement in _LANGUAGE_PARTS.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return "" if name.startswith(_OTHER_PARTS) else name


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
        else:
            place.data.normal_(0.0, place.columns.whole**-0.5, generator=generator)


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.exists():
        if not (directory / _SINGLE).exists():
            raise CheckpointError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
        return [directory / _SINGLE]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be an object with tensors")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name!r} is not a safetensors file of this directory")
        if not (directory / name).exists():
            raise CheckpointError(f"{directory / name} is missing; {_INDEX} names it")
    return [directory / name for name in names]


class StoredTensor:
    """A tensor in a safetensors file, of which nothing has been read yet."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name
        view = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(view.get_shape())
        self.type_name: str = view.get_dtype()

    def part(self, rows: Share, columns: Share | None) -> Tensor:
        """Reads [rows.size, columns.size] of it, or [rows.size]."""
        if rows.is_all and (columns is None or columns.is_all):
            return cast(Tensor, self._file.get_tensor(self._name))
        view = self._file.get_slice(self._name)
        if columns is None:
            return cast(Tensor, view[rows.start : rows.stop])
        return cast(Tensor, view[rows.start : rows.stop, columns.start : columns.stop])


def _read(path: Path, device: torch.device) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the names and tensors of a file, each to be read at once. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names = file.keys()  # it is no mapping
            for name in names:
                yield name, StoredTensor(file, name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error

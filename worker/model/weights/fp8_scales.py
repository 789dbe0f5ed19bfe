"""Reads the scales of FP8 weights: their names, their shapes, and which numbers share one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.base import Share
from worker.model.config.quantization import Fp8Format
from worker.model.errors import CheckpointError, UnsupportedModel
from worker.model.layers.fp8 import BLOCK, Fp8Layout
from worker.model.weights.safetensors_files import StoredTensor

FP8_TYPE = "F8_E4M3"
_WEIGHT = ".weight"
# Whatever its name, a weight is its values times these.
_SCALES = (".weight_scale", ".weight_scale_inv")
_INPUT_SCALES = (".input_scale", ".activation_scale")
# Scales of keys and values in FP8, which are rounded with a scale of 1: a larger one shows that
# some are beyond what e4m3 has, a tiny one that most are near its smallest.
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")
_OTHERS = (".q_scale", ".output_scale")
_TYPES = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class StoredScales:
    """Scales [n, m] on the host, float32, each of `each` rows and columns of a weight, and the one
    of what it multiplies."""

    values: Tensor
    each: tuple[int, int]
    input_scale: Tensor | None = None

    def of(self, start: int, stop: int, columns: Share) -> Tensor:
        """Returns scales that multiply rows [start, stop) of the weight, and a rank's columns."""
        rows = torch.arange(start, stop) // self.each[0]
        found = self.values[rows]
        if found.shape[1] == 1:
            return found
        return found[:, torch.arange(columns.start, columns.stop) // self.each[1]]

    def fill(self, scales: Tensor, rows: Share, columns: Share) -> None:
        """Writes those of a rank's part into `scales`, [rows], or [rows / BLOCK, columns / BLOCK]
        where BLOCK divides the part."""
        if scales.dim() == 1:
            scales.copy_(self.of(rows.start, rows.stop, columns)[:, 0])
            return
        part = self.values[rows.start // BLOCK : rows.stop // BLOCK]
        scales.copy_(part[:, columns.start // BLOCK : columns.stop // BLOCK])


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A checkpoint's tensors by name: what the model computes with, and scales by the name of the
    weight that they belong to."""

    weights: Mapping[str, StoredTensor]
    scales: Mapping[str, StoredTensor]
    input_scales: Mapping[str, StoredTensor]
    kv_scales: Mapping[str, StoredTensor]  # by their own names

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor], format: Fp8Format | None) -> StoredWeights:
        """Raises UnsupportedModel for FP8 without a `format`, CheckpointError
        for weights without scales, or scales without a weight in FP8."""
        weights: dict[str, StoredTensor] = {}
        scales: dict[str, StoredTensor] = {}
        input_scales: dict[str, StoredTensor] = {}
        kv_scales: dict[str, StoredTensor] = {}
        known = _SCALES + _INPUT_SCALES + _KV_SCALES + _OTHERS
        for name, tensor in tensors.items():
            stem, dot, last = name.rpartition(".")
            if format is None or dot + last not in known:
                weights[name] = tensor
            elif dot + last in _SCALES:
                scales[stem + _WEIGHT] = tensor
            elif dot + last in _INPUT_SCALES:
                input_scales[stem + _WEIGHT] = tensor
            elif dot + last in _KV_SCALES:
                kv_scales[name] = tensor
        found = cls(weights, scales, input_scales, kv_scales)
        found._check(format)
        return found

    def _check(self, format: Fp8Format | None) -> None:
        in_fp8 = {name for name, tensor in self.weights.items() if tensor.type_name == FP8_TYPE}
        if format is None:
            for name in sorted(in_fp8):
                raise UnsupportedModel(
                    f"{self.weights[name].path.name}: tensor {name!r} is stored as {FP8_TYPE}, but "
                    "config.json has no quantization_config"
                )
            return
        if not in_fp8:
            raise CheckpointError("config.json declares FP8 weights, but the checkpoint holds none")
        for name in sorted(in_fp8 ^ self.scales.keys()):
            tensor = self.weights.get(name) or self.scales[name]
            what = (
                "has no weight_scale" if name in in_fp8 else "has a scale, but is not stored in FP8"
            )
            raise CheckpointError(f"{tensor.path.name}: tensor {name!r} {what}")
        for name in sorted(in_fp8):
            self._each(name, format)
        for tensor in (*self.scales.values(), *self.input_scales.values()):
            if tensor.type_name not in _TYPES:
                raise UnsupportedModel(
                    f"{tensor.path.name}: scale {tensor.name!r} is stored as {tensor.type_name}, "
                    "which is not supported"
                )

    def layouts(self, format: Fp8Format) -> dict[str, Fp8Layout]:
        """Returns the layouts of weights that products over FP8 can take as they are stored."""
        if not format.quantizes_inputs or format.block not in (None, (BLOCK, BLOCK)):
            return {}
        in_blocks = format.block is not None
        return {name: Fp8Layout(in_blocks, name in self.input_scales) for name in self.scales}

    def read(self, name: str, format: Fp8Format) -> StoredScales:
        """Reads the scales of an FP8 weight. Raises CheckpointError."""
        each = self._each(name, format)
        values = self.scales[name].read().float()
        values = values if format.block is not None else values.reshape(-1, 1)
        given = self.input_scales.get(name)
        return StoredScales(values, each, None if given is None else given.read().float().max())

    def read_kv_scales(self) -> list[tuple[float, str]]:
        """Reads the scales that keys and values were measured to need in FP8; returns them with
        their names, ascending."""
        return sorted((t.read().float().max().item(), name) for name, t in self.kv_scales.items())

    def _each(self, name: str, format: Fp8Format) -> tuple[int, int]:
        """Returns the rows and columns of a weight that share a scale. Raises CheckpointError."""
        shape, stored = self.weights[name].shape, self.scales[name].shape
        if len(shape) == 2 and format.block is not None:
            if stored == tuple(
                -(-size // of) for size, of in zip(shape, format.block, strict=True)
            ):
                return format.block
        elif len(shape) == 2:
            if stored in ((), (1,), (1, 1)):
                return shape
            if stored in ((shape[0],), (shape[0], 1)):
                return 1, shape[1]
        path = self.scales[name].path
        raise CheckpointError(
            f"{path.name}: the scales of {name!r}, {list(shape)}, have shape {list(stored)}, which "
            "quantization_config in config.json does not declare"
        )

"""PoolingModel: the vectors of a batch of inputs, by transformers' model and the steps after it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from worker.model.config.pooling import PoolingConfig, PoolingMode
from worker.model.device import step_failure
from worker.model.errors import CheckpointError, UnsupportedModel

_HEAD = "pooler."  # over the first token, for the pretraining; its output is not used
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda numbers: numbers,
    "Tanh": torch.tanh,
}


class PoolingModel:
    """Computes vectors. For one thread."""

    def __init__(
        self, directory: Path, pooling: PoolingConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Loads the weights. Raises ModelError."""
        self._mode = pooling.mode
        self._device = device
        self._model = _load(directory, dtype).to(device).eval()
        self._steps = [
            _normalized if step == PoolingConfig.NORMALIZE else _linear(directory / step, device)
            for step in pooling.steps
        ]
        self._is_normalized = PoolingConfig.NORMALIZE in pooling.steps

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().num_embeddings)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._model.parameters())

    @torch.inference_mode()
    def embed(
        self, inputs: Sequence[Sequence[int]], dimensions: Sequence[int]
    ) -> list[bytes | None]:
        """Returns for each input the first `dimensions` numbers of its vector, float32 in little
        endian, normalized again where the model's are; None where one of them is not finite.

        Raises OutOfMemory and DeviceLost.
        """
        try:
            vectors = self._vectors(inputs)
            finite = torch.isfinite(vectors).all(dim=1).tolist()
            shortened = [vectors[row, :size] for row, size in enumerate(dimensions)]
            if self._is_normalized:
                shortened = [
                    _normalized(vector) if len(vector) < vectors.shape[1] else vector
                    for vector in shortened
                ]
            rows = [vector.cpu().numpy().astype("<f4").tobytes() for vector in shortened]
        except Exception as error:
            failure = step_failure(error, self._device)
            if failure is not None:
                raise failure from error
            raise
        return [row if is_sound else None for row, is_sound in zip(rows, finite, strict=True)]

    def _vectors(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """Returns float32 [inputs, size]."""
        lengths = torch.tensor([len(one) for one in inputs])
        padded = torch.zeros(len(inputs), int(lengths.max()), dtype=torch.int64)
        for row, one in enumerate(inputs):
            padded[row, : len(one)] = torch.tensor(one)
        lengths, token_ids = lengths.to(self._device), padded.to(self._device)
        positions = torch.arange(token_ids.shape[1], device=self._device)
        mask = positions < lengths[:, None]
        output = self._model(input_ids=token_ids, attention_mask=mask.to(torch.int64))
        vectors = _pooled(output.last_hidden_state.float(), mask, lengths, self._mode)
        for step in self._steps:
            vectors = step(vectors)
        return vectors


def _pooled(hidden: Tensor, mask: Tensor, lengths: Tensor, mode: PoolingMode) -> Tensor:
    """Pools [inputs, positions, width] to [inputs, width]; padding comes last."""
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    return (hidden * mask[:, :, None]).sum(dim=1) / lengths[:, None]


def _normalized(vectors: Tensor) -> Tensor:
    return nn.functional.normalize(vectors, dim=-1)


def _linear(directory: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Returns a Dense module of sentence-transformers. Raises ModelError."""
    config = json.loads((directory / "config.json").read_bytes())
    name = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{directory}: the activation {name!r} is not supported")
    try:
        weights = load_file(directory / "model.safetensors")
    except Exception as error:
        raise CheckpointError(f"{directory}: no weights: {_short(error)}") from error
    weight = weights["linear.weight"].float().to(device)
    bias = weights["linear.bias"].float().to(device) if "linear.bias" in weights else None
    activation = _ACTIVATIONS[name]
    return lambda vectors: activation(nn.functional.linear(vectors, weight, bias))


def _load(directory: Path, dtype: torch.dtype) -> Any:
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        with contextlib.suppress(AttributeError):
            config.use_cache = False
        model, info = AutoModel.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds: types, files, shapes
        raise CheckpointError(
            f"{directory} cannot be loaded by transformers: {_short(error)}"
        ) from error
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(_HEAD))
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} tensors, such as {missing[0]!r}")
    return model


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

"""PoolingConfig: how a checkpoint makes one vector of a text, by its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.model.config.context_length import ContextLength
from worker.model.errors import CheckpointError, UnsupportedModel

PoolingMode = Literal["cls", "mean", "lasttoken"]

MODULES = "modules.json"  # of sentence-transformers: what follows the model
_MODES: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
_FLAGS: dict[str, str] = {mode: flag for flag, mode in _MODES.items()}
# Their positions begin after the padding token's, which config.json counts.
_OFFSET_POSITIONS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """`steps` follow the pooling, in order: NORMALIZE, or the directory of a linear layer."""

    mode: PoolingMode
    steps: tuple[str, ...]
    max_input_tokens: int  # of one input, special tokens included
    size: int  # of a vector

    NORMALIZE = "normalize"

    @classmethod
    def of(cls, directory: Path, *, is_chosen: bool = False) -> PoolingConfig | None:
        """Returns that of a checkpoint which makes vectors; None for one that generates text.

        It makes vectors if modules.json has a pooling, or if its first architecture has no head.
        `is_chosen`: it shall make vectors in any case. Without a modules.json a decoder's vector
        is that of its last token, normalized, and an encoder's the mean.

        Raises ModelError for files that cannot be used.
        """
        try:
            config = _object(directory / "config.json")
        except CheckpointError:
            return None  # the reader of the whole file reports its fault
        modules = _modules(directory / MODULES)
        kinds = [_kind(module) for module in modules]
        architecture = next(iter(config.get("architectures") or ()), "")
        name = str(architecture)
        has_head = not name.endswith("Model") or name.endswith("HeadModel")  # GPT2LMHeadModel
        if has_head and not is_chosen and "Pooling" not in kinds:
            return None
        text = config.get("text_config")
        size = (text if isinstance(text, Mapping) else config).get("hidden_size")
        if not isinstance(size, int):
            raise UnsupportedModel("config.json has no hidden_size")
        is_decoder = "CausalLM" in name or "LMHead" in name
        mode: PoolingMode = "lasttoken" if is_decoder else "mean"
        steps = [cls.NORMALIZE] if not modules and mode == "lasttoken" else []
        for module, kind in zip(modules, kinds, strict=True):
            folder = directory / str(module.get("path") or "")
            if kind == "Transformer" and folder == directory:
                continue
            if kind == "Pooling":
                mode = _mode(_object(folder / "config.json"))
            elif kind == "Dense":
                steps.append(folder.name)
                size = int(_object(folder / "config.json")["out_features"])
            elif kind == "Normalize":
                steps.append(cls.NORMALIZE)
            else:
                raise UnsupportedModel(f"{MODULES} has a module {kind!r}, which is not supported")
        return cls(
            mode=mode,
            steps=tuple(steps),
            max_input_tokens=_max_input_tokens(directory, config),
            size=size,
        )


def pooling_config(checkpoint: Path | str, runner: str) -> PoolingConfig | None:
    """Returns how a worker with that PENSTOCK_RUNNER makes vectors; None: it generates text.
    Raises ModelError."""
    if runner == "echo":
        return None
    return PoolingConfig.of(Path(checkpoint), is_chosen=runner == "pooling")


def _max_input_tokens(directory: Path, config: Mapping[str, Any]) -> int:
    context = ContextLength.of(config)
    if context is None:
        raise UnsupportedModel("config.json has no max_position_embeddings")
    longest = context.default
    if config.get("model_type") in _OFFSET_POSITIONS:
        # MPNet's positions begin after 1, whatever its padding token is.
        pad = 1 if config["model_type"] == "mpnet" else int(config.get("pad_token_id") or 0)
        longest -= pad + 1
    file = directory / "sentence_bert_config.json"
    limit = _object(file).get("max_seq_length") if file.is_file() else None
    return min(longest, limit) if isinstance(limit, int) and limit > 0 else longest


def _kind(module: Mapping[str, Any]) -> str:
    """Returns the class of a module, without its package, which depends on the release."""
    return str(module.get("type") or "").rpartition(".")[2]


def _mode(pooling: Mapping[str, Any]) -> PoolingMode:
    named = pooling.get("pooling_mode")  # of newer releases, instead of a flag for each mode
    flags = [_FLAGS.get(named, named)] if isinstance(named, str) else []
    flags += [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    modes = {_MODES.get(name) for name in flags}
    mode = modes.pop() if len(modes) == 1 else None
    if mode is None:
        raise UnsupportedModel(
            f"the pooling {', '.join(flags) or 'of no mode'} is not supported: it must be one of "
            "cls, mean and lasttoken"
        )
    return mode


def _modules(file: Path) -> list[Mapping[str, Any]]:
    if not file.is_file():
        return []
    found = _json(file)
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise CheckpointError(f"{file} is not a list of modules")
    return found


def _object(file: Path) -> Mapping[str, Any]:
    found = _json(file)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{file} is not a JSON object")
    return found


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error

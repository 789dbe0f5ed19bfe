"""Checks a checkpoint by its file and member names, before torch and transformers are imported.

Those imports take seconds, on a busy machine minutes; a wrong checkpoint is reported
first. All other checks are where the model is built.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.engine_options import EngineOptions
from worker.model.config.gguf_header import is_gguf
from worker.model.config.quantization import check_method
from worker.model.errors import CheckpointError, UnsupportedModel

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.onnx")
_TYPES_OF_TRANSFORMERS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")


def check_checkpoint(options: EngineOptions) -> None:
    """Raises ModelError for a checkpoint that no implementation of this engine can serve."""
    directory = Path(options.checkpoint)
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # the reader of the whole file reports its fault
    if not isinstance(config, Mapping):
        return
    if options.model_impl != "native":
        _check_model_type(config)
    check_method(config)
    if options.load_format == "auto":
        _check_weights(directory)


def _check_model_type(config: Mapping[str, Any]) -> None:
    """Refuses a type of model that transformers does not have; native families are among its."""
    model_type, sources = config.get("model_type"), _sources_of_transformers()
    if not isinstance(model_type, str) or not sources:
        return
    if not any(f'"{model_type}"' in source for source in sources):
        own_code = "; its own code (auto_map) is never run" if config.get("auto_map") else ""
        raise UnsupportedModel(
            f"model_type {model_type!r} is unknown to the installed transformers{own_code}"
        )


def _sources_of_transformers() -> list[str]:
    """Returns the text of the modules that list the types of models, without importing them."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    paths = (Path(spec.origin).parent / name for name in _TYPES_OF_TRANSFORMERS)
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


def _check_weights(directory: Path) -> None:
    if any(directory.glob("*.safetensors*")) or is_gguf(directory):
        return
    others = [path.name for kind in _OTHER_WEIGHTS for path in sorted(directory.glob(kind))]
    if others:
        raise CheckpointError(
            f"{directory} has no *.safetensors, and {others[0]} is not supported: "
            "convert the weights to safetensors"
        )

"""LoRA adapters, as PENSTOCK_LORA_MODULES names them: their directories, ranks and digests.

An adapter is a directory in the format of PEFT: `adapter_config.json` beside the low-rank matrices
in `adapter_model.safetensors`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.text.base import TextInvalid
from shared.text.checkpoint_files import read_json
from shared.text.model_card import DIGEST_CHARS
from worker.model.errors import CheckpointError

MAX_ADAPTERS = 64  # of one worker
MAX_NAME = 200
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"[^\s{}=]+")
_PEFT = "base_model.model."
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. `rank`: the largest of its matrices."""

    name: str  # in requests
    path: Path
    rank: int


def parse_lora_modules(text: str) -> dict[str, Path]:
    """Returns the absolute directories of `name=path,name=path` by name; {} for no text. Raises
    ValueError with a sentence."""
    found: dict[str, Path] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, path = entry.partition("=")
        if not path or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            raise ValueError(
                f"{entry[:MAX_NAME]!r} is no name, `=` and the directory of an adapter"
            )
        if name in found:
            raise ValueError(f"{name!r} names two adapters")
        try:
            found[name] = Path(path).expanduser().absolute()
        except RuntimeError as error:  # "~name" of no user
            raise ValueError(str(error)) from None
    if len(found) > MAX_ADAPTERS:
        raise ValueError(f"{len(found)} adapters are more than {MAX_ADAPTERS}")
    return found


def read_adapters(text: str) -> Mapping[str, Adapter]:
    """Returns the adapters of PENSTOCK_LORA_MODULES by name.

    Raises CheckpointError with a sentence for one whose directory or files cannot be used.
    """
    return {name: _read(name, path) for name, path in parse_lora_modules(text).items()}


def adapter_digest(name: str, path: Path, base: str) -> str:
    """Returns a digest of an adapter's files over a model whose weights have the digest `base`.

    Raises OSError.
    """
    whole = hashlib.sha256(f"{base}/{name}/".encode())
    whole.update((path / CONFIG).read_bytes())
    with (path / WEIGHTS).open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            whole.update(data)
    return whole.hexdigest()[:DIGEST_CHARS]


def check_fits(adapter: Adapter, checkpoint: Path) -> None:
    """Raises CheckpointError with a sentence where matrices of the adapter have other sizes than
    the weights of the same names in a checkpoint: vLLM would cut or fill them."""
    files = sorted(checkpoint.glob("*.safetensors"))
    shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    for name, (rows, columns) in _matrices(adapter.path / WEIGHTS).items():
        module, _, kind = name.removeprefix(_PEFT).removesuffix(".weight").rpartition(".")
        weight = shapes.get(f"{module}.weight", ())
        if len(weight) != 2:  # of another layout, such as a quantised one
            continue
        wanted, has = (weight[1], columns) if kind == "lora_A" else (weight[0], rows)
        if kind in ("lora_A", "lora_B") and wanted != has:
            raise CheckpointError(
                f"PENSTOCK_LORA_MODULES: the adapter {adapter.name!r} is for another model: its "
                f"{module}.{kind} has the size {has} where this model has {wanted}"
            )


def _matrices(path: Path) -> dict[str, tuple[int, int]]:
    shapes = _shapes(path).items()
    return {name: (shape[0], shape[1]) for name, shape in shapes if len(shape) == 2}


def _shapes(path: Path) -> dict[str, list[int]]:
    """Returns the tensors' shapes by name. Raises CheckpointError."""
    # Imported here: the settings of a worker without an engine of its own are read without it.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read(name: str, path: Path) -> Adapter:
    what = f"PENSTOCK_LORA_MODULES: the adapter {name!r}"
    for file in (CONFIG, WEIGHTS):
        if not (path / file).is_file():
            raise CheckpointError(f"{what} has no {file} in {path}")
    try:
        config = read_json(path / CONFIG)
    except TextInvalid as error:
        raise CheckpointError(f"{what}: {error}") from error
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{what} is no LoRA adapter: {path / CONFIG} has peft_type "
            f"{str(config.get('peft_type'))[:40]!r}"
        )
    for rank in ranks:
        if type(rank) is not int or rank < 1:
            raise CheckpointError(
                f"{what} has the rank {str(rank)[:40]!r} in {path / CONFIG}; a rank is at least 1"
            )
    return Adapter(name, path, max(ranks))

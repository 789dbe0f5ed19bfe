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
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. `rank`: the largest of its matrices."""

    name: str  # in requests
    path: Path
    rank: int

    def digest(self, base: str) -> str:
        """Returns a digest of its weights over a model whose own have the digest `base`.

        Raises OSError.
        """
        whole = hashlib.sha256(f"{base}/{self.name}/".encode())
        whole.update((self.path / CONFIG).read_bytes())
        with (self.path / WEIGHTS).open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                whole.update(data)
        return whole.hexdigest()[:DIGEST_CHARS]


def parse_lora_modules(text: str) -> dict[str, Path]:
    """Returns the absolute directories of `name=path,name=path` by name; {} for no text. Raises
    ValueError with a sentence."""
    found: dict[str, Path] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, path = entry.partition("=")
        if not path or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            raise ValueError(f"{entry[:MAX_NAME]!r} is no name, `=` and the directory of an adapter")
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

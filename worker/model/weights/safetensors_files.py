"""Lists the tensors of a directory's safetensors files.

The format: eight bytes with the header's length, the header (JSON: type, shape and offsets of each
tensor), the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.model.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # of the format
# Types of the format that torch has; the others' tensors cannot be read.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor: `num_bytes` of `path` from `offset` on, row by row."""

    path: Path
    name: str
    type_name: str  # the format's, e.g. "BF16"
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """That of its numbers, if the file has them as the model does."""
        return DTYPES[self.type_name]

    @property
    def rows_at_once(self) -> int:
        """Rows of which all or none are read."""
        return 1

    @property
    def row_bytes(self) -> int:
        """Bytes of memory that a row needs while it is read."""
        return self.num_bytes // self.shape[0]

    def numbers(self, memory: Tensor) -> Tensor:
        """Returns the rows [n, ...] whose bytes are in uint8 `memory` [num_bytes of n rows]."""
        return memory.view(DTYPES[self.type_name]).view(-1, *self.shape[1:])

    def read(self) -> Tensor:
        """Returns all of it, on the host. Raises CheckpointError."""
        memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.read_into(memory)
        return self.numbers(memory).view(self.shape)

    def read_into(self, memory: Tensor, start: int = 0) -> None:
        """Fills uint8 `memory` [n], on the host and contiguous, with the bytes of row `start` and
        of those after it.

        Raises CheckpointError for a file that cannot be read, or has become shorter.
        """
        row_bytes = self.num_bytes // self.shape[0] if self.shape else 0
        view = memoryview(memory.numpy().data)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start * row_bytes)
                while view:
                    if not (count := file.readinto(view)):
                        raise EOFError(f"it ends at byte {file.tell()}")
                    view = view[count:]
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} cannot be read: {error}"
            ) from error


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of the directory's files by name, from the headers alone.

    Raises CheckpointError naming the file: missing, cut off, not of the format, or with a tensor
    that another one has as well.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(directory):
        for tensor in _header(path):
            if tensor.name in found:
                raise CheckpointError(f"{path.name}: repeated tensor {tensor.name!r}")
            found[tensor.name] = tensor
    return found


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


def _header(path: Path) -> list[StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        start = _LENGTH_BYTES + length
        tensors = [
            _entry(path, name, entry, start)
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors), default=start)
    if end != size:
        what = "is cut off" if end > size else "has more bytes than its header declares"
        raise CheckpointError(f"{path} {what}: it has {size} bytes and should have {end}")
    return tensors


def _entry(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """Raises ValueError, KeyError or TypeError for an entry that is not of the format."""
    shape = tuple(int(size) for size in entry["shape"])
    first, last = (int(offset) for offset in entry["data_offsets"])
    type_name = str(entry["dtype"])
    if first < 0 or last < first or any(size < 0 for size in shape):
        raise ValueError(f"tensor {name!r} has offsets {first} to {last}, shape {list(shape)}")
    dtype = DTYPES.get(type_name)
    if dtype is not None and math.prod(shape) * dtype.itemsize != last - first:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} has {last - first} bytes")
    return StoredTensor(path, name, type_name, shape, start + first, last - first)

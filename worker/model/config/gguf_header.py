"""Reads the headers of GGUF files with bounds: their content is untrusted.

The format: "GGUF", version, the number of tensors and of metadata; metadata by key; name, shape,
type and offset of each tensor; the tensors' bytes, aligned. A model may be in several files.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from worker.model.errors import CheckpointError, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
MAX_HEADER_BYTES = 512 * 2**20  # vocabularies of published models take a thirtieth of it
_MAX_ENTRIES = 2**16  # of metadata, and of tensors
_MAX_NAME_BYTES = 2**16 - 1  # of the format
_MAX_DIMENSIONS = 4  # of the format
_MAX_SHARDS = 10_000
_DEFAULT_ALIGNMENT = 32
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_STRING, _ARRAY = 8, 9
# Types of metadata: the code of `struct` and `array`.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# Elements of a block and its bytes, by the number of the type; the names are ggml's.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    30: ("BF16", 1, 2),
}
# Types of ggml that are not read, to name them.
_OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """The place of a tensor: `num_bytes` of `path` from `offset` on. `shape` is in torch's order,
    the fastest dimension last."""

    path: Path
    name: str
    type_name: str  # ggml's, e.g. "Q4_K"
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The metadata and the tensors of one model, of all its files."""

    path: Path  # the first file
    metadata: Mapping[str, Any]  # by key; arrays are lists of strings or arrays of numbers
    entries: Mapping[str, GgufEntry]  # by name

    @property
    def architecture(self) -> str:
        """Raises CheckpointError where the file has none."""
        return self.text("general.architecture") or self._without("general.architecture")

    def text(self, key: str) -> str | None:
        """Returns a string, None where the file has none. Raises CheckpointError for others."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.path.name}: {key} must be a string, got {value!r:.60}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number. Raises CheckpointError where it is missing without a `default`,
        or something else."""
        value = self.metadata.get(key, default)
        if value is None:
            self._without(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise CheckpointError(f"{self.path.name}: {key} must be a number, got {value!r:.60}")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns a whole number from 0 on: of an array, whose elements must be equal, any of them.
        Raises CheckpointError, or UnsupportedModel for an array of different ones."""
        value = self.metadata.get(key, default)
        if isinstance(value, array):
            different = sorted(set(value))
            if len(different) != 1:
                raise UnsupportedModel(
                    f"{self.path.name}: {key} differs between layers ({different[:4]}), which is "
                    "not supported"
                )
            value = different[0]
        if value is None:
            self._without(key)
        if type(value) is not int or not 0 <= value < 2**48:
            raise CheckpointError(
                f"{self.path.name}: {key} must be a whole number, got {value!r:.60}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Raises CheckpointError for a value that is not true or false."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path.name}: {key} must be true or false")
        return value

    def _without(self, key: str) -> Any:
        raise CheckpointError(f"{self.path.name} has no {key} in its metadata")


def is_gguf(directory: Path) -> bool:
    """Returns whether a directory has the weights of a model as GGUF, and as nothing else."""
    return any(directory.glob("*.gguf")) and not any(directory.glob("*.safetensors*"))


def shards_of(path: Path) -> list[Path]:
    """Returns all files of the model that one of them belongs to, the first one first. Raises
    CheckpointError that names a missing one."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= _MAX_SHARDS:
        raise CheckpointError(f"{path} is not one of {count} files: its name must be as it was")
    names = [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    paths = [path.with_name(name) for name in names]
    for one in paths:
        if not one.is_file():
            raise CheckpointError(f"{one} is missing: {path.name} is one of {count} files")
    return paths


def models_in(directory: Path) -> list[Path]:
    """Returns the first file of each model in a directory, by name. Projectors for images, which
    are files of their own, are left out."""
    paths = [p for p in directory.glob("*.gguf") if not p.name.lower().startswith("mmproj")]
    return sorted(path for path in paths if is_first(path.name))


def is_first(name: str) -> bool:
    """Returns whether a file of this name is its model's only or first one."""
    found = _SHARD.fullmatch(name)
    return found is None or int(found["number"]) == 1


def model_name(name: str) -> str:
    """Returns a file's name without what numbers it and without ".gguf"."""
    found = _SHARD.fullmatch(name)
    return found["stem"] if found else name.removesuffix(".gguf")


def read_gguf(path: Path) -> GgufModel:
    """Reads the headers of a model's files, of which `path` is one.

    Raises CheckpointError that names the file: missing, cut off, not of the format, beyond its
    bounds, or a tensor or key that comes twice; UnsupportedModel for a type of weights or a version
    that is not read.
    """
    paths = shards_of(path)
    metadata: dict[str, Any] = {}
    entries: dict[str, GgufEntry] = {}
    for number, one in enumerate(paths):
        own, found = _read_file(one)
        if len(paths) > 1:
            _check_shard(one, own, number, len(paths))
        metadata = metadata or own
        for entry in found:
            if entry.name in entries:
                raise CheckpointError(f"{one.name}: repeated tensor {entry.name!r}")
            entries[entry.name] = entry
    model = GgufModel(paths[0], metadata, entries)
    is_whole = len(paths) > 1 or model.whole("split.count", 1) in (0, 1)
    if not is_whole or model.whole("split.tensors.count", len(entries)) != len(entries):
        raise CheckpointError(
            f"{paths[0]} is one of several files by its metadata: all of them must be there, with "
            "the names that they were made with (-00001-of-00002.gguf)"
        )
    return model


def _check_shard(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    stored = (metadata.get("split.no"), metadata.get("split.count"))
    if stored != (number, count):
        raise CheckpointError(
            f"{path.name}: by its metadata it is number {stored[0]} of {stored[1]}, counted from "
            f"0, by its name {number} of {count}"
        )


def _read_file(path: Path) -> tuple[dict[str, Any], list[GgufEntry]]:
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=2**20) as file:
            return _Reader(path, file, size).read()
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error


class _Reader:
    """Reads one header from its start on. Raises ValueError, EOFError or OSError."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._left = min(size, MAX_HEADER_BYTES)

    def read(self) -> tuple[dict[str, Any], list[GgufEntry]]:
        """Returns the metadata and the tensors, which lie within the file."""
        if (magic := self._bytes(4)) != _MAGIC:
            raise ValueError(f"it starts with {magic!r}")
        version = self._number("I")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in _VERSIONS
            raise UnsupportedModel(
                f"{self._path} is GGUF "
                + ("of a big-endian machine" if is_swapped else f"version {version}")
                + "; versions 2 and 3, little-endian, are read: convert the model again"
            )
        num_tensors, num_keys = self._count("tensors"), self._count("metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name()
            if key in metadata:
                raise ValueError(f"repeated key {key!r}")
            metadata[key] = self._value(int(self._number("I")), key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment not in (1 << n for n in range(3, 17)):
            raise ValueError(f"general.alignment is {alignment!r:.40}")
        tensors = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._file.tell() // alignment) * alignment
        return metadata, list(self._placed(tensors, start, alignment))

    def _placed(
        self, tensors: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> Iterator[GgufEntry]:
        """Yields the tensors with their places, which do not overlap."""
        end = start
        for name, shape, type_number, offset in sorted(tensors, key=lambda tensor: tensor[3]):
            if type_number not in TYPES:
                type_name = _OTHER_TYPES.get(type_number, f"type {type_number}")
                known = ", ".join(known for known, _, _ in TYPES.values())
                raise UnsupportedModel(
                    f"{self._path.name}: tensor {name!r} is stored as {type_name}, which is not "
                    f"supported; {known} are. Take a file of the model with one of these types"
                )
            type_name, block, block_bytes = TYPES[type_number]
            if shape[-1] % block:
                raise ValueError(f"tensor {name!r}: rows of {shape[-1]} are not blocks of {block}")
            num_bytes = math.prod(shape) // block * block_bytes
            if offset % alignment:
                raise ValueError(f"tensor {name!r} is at {offset}, not aligned to {alignment}")
            if start + offset < end:
                raise ValueError(f"tensor {name!r} overlaps with another one")
            end = start + offset + num_bytes
            if end > self._size:
                raise ValueError(
                    f"tensor {name!r} ends at byte {end}, and the file at {self._size}: it is cut "
                    "off"
                )
            yield GgufEntry(self._path, name, type_name, shape, start + offset, num_bytes)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._name(), int(self._number("I"))
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(int(self._number("Q")) for _ in range(num_dimensions))[::-1]
        if not all(0 < size <= 2**40 for size in shape):
            raise ValueError(f"tensor {name!r} has shape {list(shape)}")
        return name, shape, int(self._number("I")), int(self._number("Q"))

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string(self._left)
        if kind != _ARRAY:
            raise ValueError(f"{key!r} is of type {kind}, which the format does not have")
        element, count = int(self._number("I")), int(self._number("Q"))
        if element == _STRING:
            if count > self._left // 8:  # each has its length
                raise EOFError(f"{key!r} has {count} strings, more than the header can hold")
            return [self._string(self._left) for _ in range(count)]
        if element not in _NUMBERS:
            raise ValueError(f"{key!r} is an array of type {element}, which is not supported")
        code = "B" if element == 7 else _NUMBERS[element]
        values = array("I" if array(code).itemsize > 8 else code)
        values.frombytes(self._bytes(count * values.itemsize))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def _count(self, what: str) -> int:
        count = int(self._number("Q"))
        if count > _MAX_ENTRIES:
            raise ValueError(f"it has {count} {what}; at most {_MAX_ENTRIES} are read")
        return count

    def _name(self) -> str:
        return self._string(_MAX_NAME_BYTES)

    def _string(self, max_bytes: int) -> str:
        length = int(self._number("Q"))
        if length > max_bytes:
            raise ValueError(f"a string of {length} bytes at {self._file.tell()}")
        # Some files have tokens that are not whole characters; none of them can be a text's.
        return self._bytes(length).decode("utf-8", "replace")

    def _number(self, code: str) -> int | float | bool:
        kind = struct.Struct(f"<{code}")
        (value,) = kind.unpack(self._bytes(kind.size))
        return value  # type: ignore[no-any-return]

    def _bytes(self, count: int) -> bytes:
        if count > self._left:
            is_cut = self._size <= MAX_HEADER_BYTES
            what = "the file ends" if is_cut else "the header is longer than any real one"
            raise EOFError(f"{what}: {count} bytes are missing at {self._file.tell()}")
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError(f"it ends at byte {self._file.tell()}")
        self._left -= count
        return data

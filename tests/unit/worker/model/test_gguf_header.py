"""Headers of GGUF files that nobody should trust: each fault is refused by its name, in bounds."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from worker.model.config.gguf_header import is_gguf, model_name, read_gguf, shards_of
from worker.model.errors import CheckpointError, ModelError, UnsupportedModel

UINT32, STRING, ARRAY = 4, 8, 9
F32, Q4_K, IQ2_XXS = 0, 12, 16


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def write(
    path: Path,
    keys: list[bytes],
    tensors: list[bytes],
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> Path:
    """Writes a file, with `data` bytes after the aligned header."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(data))
    return path


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def refused(path: Path, sentence: str, kind: type[ModelError] = CheckpointError) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        read_gguf(path)
    assert path.name in str(caught.value)


def test_metadata_and_places_of_tensors_are_read(tmp_path: Path) -> None:
    keys = [
        ARCHITECTURE,
        key("a.list", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("\u00e9")),
        key("a.numbers", ARRAY, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 3.0)),
        key("a.flag", 7, b"\1"),
        key("a.large", 10, struct.pack("<Q", 2**40)),
        key("general.alignment", UINT32, struct.pack("<I", 64)),
    ]
    tensors = [tensor("w", (3, 256), Q4_K, 64), tensor("b", (4,), F32, 0)]
    path = write(tmp_path / "m.gguf", keys, tensors, 64 + 32 + 3 * 144)
    found = read_gguf(path)
    assert found.architecture == "llama"
    assert found.metadata["a.list"] == ["x", "\u00e9"]
    assert list(found.metadata["a.numbers"]) == [1.0, 2.0, 3.0]
    assert found.flag("a.flag", False) is True
    assert found.whole("a.large") == 2**40
    weight, bias = found.entries["w"], found.entries["b"]
    assert (weight.shape, weight.type_name, weight.num_bytes) == ((3, 256), "Q4_K", 3 * 144)
    assert weight.offset % 64 == 0
    assert weight.offset - bias.offset == 64


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "0 bytes|4 bytes are missing"),
        (b"GGUF\3\0\0\0", "8 bytes are missing"),
        (b"<html>, an error of a proxy", "it starts with b'<htm'"),
        (b"version https://git-lfs.github.com", "it starts with b'vers'"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, sentence)


@pytest.mark.parametrize(
    ("version", "sentence"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")]
)
def test_another_version_is_refused_with_those_that_are_read(
    tmp_path: Path, version: int, sentence: str
) -> None:
    path = write(tmp_path / "m.gguf", [ARCHITECTURE], [], version=version)
    refused(path, f"{sentence}.*versions 2 and 3, little-endian", UnsupportedModel)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ([ARCHITECTURE, ARCHITECTURE], "repeated key 'general.architecture'"),
        ([struct.pack("<Q", 2**62)], "a string of 4611686018427387904 bytes"),
        ([key("a", STRING, struct.pack("<Q", 2**40))], "a string of 1099511627776 bytes"),
        ([key("a", ARRAY, struct.pack("<IQ", STRING, 2**61))], "strings, more than the header"),
        ([key("a", ARRAY, struct.pack("<IQ", 6, 2**61))], "bytes are missing"),
        ([key("a", ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1))], "an array of type 9"),
        ([key("a", 99, b"")], "type 99, which the format does not have"),
        ([key("general.alignment", UINT32, struct.pack("<I", 0))], "general.alignment is 0"),
        ([key("general.alignment", UINT32, struct.pack("<I", 48))], "general.alignment is 48"),
    ],
)
def test_metadata_beyond_their_bounds_are_refused(
    tmp_path: Path, keys: list[bytes], sentence: str
) -> None:
    refused(write(tmp_path / "m.gguf", keys, []), sentence)


@pytest.mark.parametrize("counts", [{"num_keys": 2**63}, {"num_tensors": 2**63}])
def test_counts_beyond_their_bounds_are_refused(tmp_path: Path, counts: dict[str, int]) -> None:
    refused(write(tmp_path / "m.gguf", [ARCHITECTURE], [], **counts), "at most 65536 are read")


def test_counts_of_more_than_there_is_are_refused(tmp_path: Path) -> None:
    refused(write(tmp_path / "m.gguf", [ARCHITECTURE], [], num_tensors=60_000), "has 0 dimensions")


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([tensor("w", ())], "'w' has 0 dimensions"),
        ([tensor("w", (1,) * 5)], "'w' has 5 dimensions"),
        ([tensor("w", (0, 4))], r"'w' has shape \[0, 4\]"),
        ([tensor("w", (2**63, 2**63))], "'w' has shape"),
        ([tensor("w", (2**39, 2**39))], "'w' ends at byte .* cut off"),
        ([tensor("w", (65,))], "'w' ends at byte .* cut off"),
        ([tensor("w", (4,), F32, 2**62)], "'w' ends at byte .* cut off"),
        ([tensor("w", (4,), F32, 4)], "'w' is at 4, not aligned to 32"),
        ([tensor("w", (4, 100), Q4_K)], "'w': rows of 100 are not blocks of 256"),
        ([tensor("w", (16,)), tensor("v", (16,), F32, 32)], "'v' overlaps"),
        ([tensor("w", (4,)), tensor("w", (4,), F32, 32)], "repeated tensor 'w'"),
    ],
)
def test_tensors_outside_of_the_file_or_of_the_format_are_refused(
    tmp_path: Path, tensors: list[bytes], sentence: str
) -> None:
    refused(write(tmp_path / "m.gguf", [ARCHITECTURE], tensors, 256), sentence)


@pytest.mark.parametrize(("kind", "name"), [(IQ2_XXS, "IQ2_XXS"), (39, "MXFP4"), (777, "type 777")])
def test_a_type_that_is_not_read_is_refused_with_those_that_are(
    tmp_path: Path, kind: int, name: str
) -> None:
    path = write(tmp_path / "m.gguf", [ARCHITECTURE], [tensor("w", (256,), kind)], 256)
    refused(path, f"'w' is stored as {name}, which is not supported; F32, .*Q4_K", UnsupportedModel)


def test_the_memory_for_a_header_does_not_follow_its_claims(tmp_path: Path) -> None:
    """A sparse file of a terabyte, whose only key is an array as long as that."""
    path = write(tmp_path / "m.gguf", [key("a", ARRAY, struct.pack("<IQ", 0, 2**40 - 2**10))], [])
    os.truncate(path, 2**40)
    tracemalloc.start()
    try:
        refused(path, "the header is longer than any real one")
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def shard(folder: Path, number: int, count: int, *, stored: tuple[int, int, int]) -> Path:
    names = ("split.no", "split.count", "split.tensors.count")
    keys = [ARCHITECTURE] + [
        key(name, UINT32, struct.pack("<I", value))
        for name, value in zip(names, stored, strict=True)
    ]
    path = folder / f"m-{number:05}-of-{count:05}.gguf"
    return write(path, keys, [tensor(f"w{number}", (4,))], 32)


def test_shards_must_be_what_their_names_say(tmp_path: Path) -> None:
    first = shard(tmp_path, 1, 2, stored=(0, 2, 2))
    second = shard(tmp_path, 2, 2, stored=(1, 2, 2))
    assert shards_of(second) == [first, second]
    assert set(read_gguf(second).entries) == {"w1", "w2"}
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"it is number 0 of 2.*by its name 1 of 2"):
        read_gguf(first)
    shard(tmp_path, 2, 2, stored=(1, 2, 3))
    shard(tmp_path, 1, 2, stored=(0, 2, 3))
    with pytest.raises(CheckpointError, match="one of several files by its metadata"):
        read_gguf(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second.name} is missing"):
        read_gguf(first)
    renamed = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"made with \(-00001-of-00002\.gguf\)"):
        read_gguf(renamed)


@pytest.mark.parametrize("name", ["m-00003-of-00002.gguf", "m-00000-of-00002.gguf"])
def test_a_shard_of_an_impossible_number_is_refused(tmp_path: Path, name: str) -> None:
    refused(write(tmp_path / name, [ARCHITECTURE], []), "not one of 2 files")


def test_safetensors_come_before_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert is_gguf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert not is_gguf(tmp_path)
    assert model_name("m-Q4_K_M.gguf") == "m-Q4_K_M"

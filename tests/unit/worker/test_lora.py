"""PENSTOCK_LORA_MODULES and the adapters that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.settings import SettingsError, load_settings
from tests.support.checkpoints import make_checkpoint
from tests.support.lora_adapters import write_adapter
from worker.engines.vllm.options import lora_args
from worker.lora import (
    CONFIG,
    WEIGHTS,
    Adapter,
    adapter_digest,
    check_fits,
    parse_lora_modules,
    read_adapters,
)
from worker.model.errors import CheckpointError
from worker.settings import WorkerSettings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "base")


def test_adapters_are_listed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    listed = parse_lora_modules(" team/a=one, b=~/two,,c=/three=3 ")
    home = Path("/home/ann/two")
    assert listed == {"team/a": tmp_path / "one", "b": home, "c": Path("/three=3")}
    assert parse_lora_modules("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/a/directory", "'/a/directory' is no name, `=` and the directory"),
        ("a=", "'a=' is no name"),
        ("a b=/x", "is no name"),
        ("a=/x,a=/y", "'a' names two adapters"),
        (",".join(f"a{i}=/x" for i in range(65)), "65 adapters are more than 64"),
    ],
)
def test_another_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_lora_modules(text)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LORA_MODULES": "a=/nowhere"}, "the adapter 'a': there is no directory '/nowhere'"),
        ({"LORA_MODULES": "m=/", "SERVED_MODEL_NAME": "m"}, "'m' is the name of the model itself"),
        ({"LORA_MODULES": "a=/", "MODELS": "x,y"}, "exclude each other: adapters fit one model"),
        ({"LORA_MODULES": "a=/", "ENGINE": "penstock"}, "a=/ is for PENSTOCK_ENGINE=vllm"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://localhost:6379/0")
    for name, value in ({"ENGINE": "vllm"} | variables).items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    with pytest.raises(SettingsError, match=words):
        load_settings(WorkerSettings)


def test_the_rank_is_the_largest_of_all_matrices(checkpoint: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", checkpoint, seed=1, rank=4)
    assert read_adapters(f"a={path}") == {"a": Adapter("a", path, 4)}
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**config, "rank_pattern": {"q_proj": 24}}))
    assert read_adapters(f"a={path}")["a"].rank == 24


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ({"peft_type": "IA3"}, "the adapter 'a' is no LoRA adapter: .* has peft_type 'IA3'"),
        ({"r": 0}, "has the rank '0' in"),
        ({"rank_pattern": {"x": "many"}}, "has the rank 'many' in"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    checkpoint: Path, tmp_path: Path, member: dict[str, Any], words: str
) -> None:
    path = write_adapter(tmp_path / "a", checkpoint, seed=1)
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | member))
    with pytest.raises(CheckpointError, match=words):
        read_adapters(f"a={path}")


def test_an_adapter_of_another_model_does_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", hidden_size=32)
    for name, base in (("own", checkpoint), ("other", other)):
        path = write_adapter(tmp_path / name / "adapter", base, seed=1)
        adapter = Adapter(name, path, 4)
        if name == "own":
            check_fits(adapter, checkpoint)
        else:
            with pytest.raises(CheckpointError, match="'other' is for another model: its model"):
                check_fits(adapter, checkpoint)


def test_a_digest_is_of_name_config_weights_and_the_model(checkpoint: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", checkpoint, seed=1)
    digests = [adapter_digest(*of) for of in (("a", path, "m"), ("b", path, "m"), ("a", path, "n"))]
    assert digests[0] == adapter_digest("a", path, "m")
    weights = bytearray((path / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (path / WEIGHTS).write_bytes(weights)
    digests.append(adapter_digest("a", path, "m"))
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("ranks", "given", "device", "expected"),
    [
        ((), {}, "cpu", {}),
        ((4, 9), {}, "cpu", {"max_loras": 3, "max_cpu_loras": 3, "max_lora_rank": 16}),
        ((512,), {}, "cuda", {"max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 512}),
        ((8,) * 20, {}, "cuda", {"max_loras": 8, "max_cpu_loras": 20, "max_lora_rank": 8}),
    ],
)
def test_vllms_arguments_have_room_for_the_adapters(
    ranks: tuple[int, ...], given: dict[str, Any], device: str, expected: dict[str, Any]
) -> None:
    adapters = {str(i): Adapter(str(i), Path("/x"), rank) for i, rank in enumerate(ranks)}
    enabled = {"enable_lora": True} if adapters else {}
    assert lora_args(adapters, given, device) == enabled | expected


@pytest.mark.parametrize(
    ("rank", "given", "words"),
    [
        (600, {}, "the adapter 'a' has the rank 600, and vLLM's largest is 512"),
        (32, {"max_lora_rank": 16}, "rank 32, and 'max_lora_rank' in PENSTOCK_VLLM_ARGS is 16"),
        (4, {"max_loras": 1}, "on a CPU 'max_loras' must be at least 2"),
    ],
)
def test_an_adapter_without_room_is_refused(rank: int, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lora_args({"a": Adapter("a", Path("/x"), rank)}, given, "cpu")

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from shared.environment import variable_of
from shared.logs import LogLevel
from shared.settings import SettingsError, load_settings
from shared.text.tool_formats import ReasoningFormat, ToolFormat
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.tiny_hub import tiny_hub
from worker.checkpoint import CheckpointNotFound, find_checkpoint
from worker.engine_options import EngineOptions, max_waiting
from worker.engine_settings import ReasoningFormatChoice, ToolFormatChoice
from worker.settings import (
    DEMO_CHECKPOINT,
    DEMO_MODEL_NAME,
    WorkerSettings,
    served_name,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WorkerSettings.model_fields:
        monkeypatch.delenv(variable_of(name), raising=False)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://localhost:6379/0")


def test_only_the_redis_url_is_needed() -> None:
    settings = load_settings(WorkerSettings)
    assert settings.model == ""
    assert settings.runner == "model"
    assert settings.max_num_seqs == 256


def test_every_tool_format_can_be_chosen() -> None:
    assert set(get_args(ToolFormatChoice)) == {"auto", "none", *ToolFormat}
    assert set(get_args(ReasoningFormatChoice)) == {"auto", "none", *ReasoningFormat}


def test_variables_have_the_fields_names_without_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MODEL": "/m",
        "RUNNER": "echo",
        "DEVICE": "cuda",
        "MAX_NUM_SEQS": "7",
        "PREFIX_CACHING": "false",
        "LOG_LEVEL": "debug",
        "NUM_THREADS": "",
    }.items():
        monkeypatch.setenv(variable_of(name), value)
    settings = load_settings(WorkerSettings)
    assert (settings.model, settings.runner, settings.device) == (
        "/m",
        "echo",
        "cuda",
    )
    assert (settings.max_num_seqs, settings.prefix_caching) == (7, False)
    assert settings.log_level is LogLevel.DEBUG
    assert settings.num_threads is None
    options = settings.engine_options(Path("/m"))
    assert (options.runner, options.max_num_seqs, options.scheduling_policy) == (
        "echo",
        7,
        "priority",
    )


def test_every_engine_option_that_is_not_derived_is_a_setting_of_that_name() -> None:
    settings = WorkerSettings(runner="echo", device="cpu", num_kv_blocks=9, step_target_ms=70)
    options = settings.engine_options(Path("/m"))
    derived = {"checkpoint": "/m", "max_waiting": max_waiting(256), "structured_output": True}
    derived |= {"cpu_weight_copies": "auto"}  # of worker.llm alone
    derived |= {"scheduling_policy": "priority"}
    for field in dataclasses.fields(EngineOptions):
        value = getattr(options, field.name)
        assert value == (derived.get(field.name) or getattr(settings, field.name)), field.name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_NUM_SEQS", "0"),
        ("MAX_NUM_SEQS", "many"),
        ("DTYPE", "int3"),
        ("DEVICE", "tpu"),
        ("RUNNER", "walker"),
        ("LEASE_MS", "1"),
        ("DRAIN_TIMEOUT_S", "-1"),
        ("LOG_LEVEL", "loud"),
        ("LOG_FORMAT", "xml"),
        ("NAMESPACE", "a{b}"),
        ("SERVED_MODEL_NAME", "two words"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(variable_of(name), value)
    with pytest.raises(SettingsError) as caught:
        load_settings(WorkerSettings)
    sentence = str(caught.value)
    assert sentence.startswith(f"PENSTOCK_{name}={value!r} cannot be used: ")
    assert "\n" not in sentence


def test_values_that_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LEASE_MS", "1000")
    monkeypatch.setenv("PENSTOCK_BEAT_INTERVAL_MS", "900")
    with pytest.raises(
        SettingsError, match=r"PENSTOCK_LEASE_MS \(1000\).*PENSTOCK_BEAT_INTERVAL_MS \(900\)"
    ):
        load_settings(WorkerSettings)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"VLLM_ARGS": "{}"}, "PENSTOCK_VLLM_ARGS is for PENSTOCK_ENGINE=vllm"),
        ({"VLLM_SAMPLER": "vllm"}, "PENSTOCK_VLLM_SAMPLER=vllm is for PENSTOCK_ENGINE=vllm"),
        ({"ENGINE_PYTHON": "/p"}, "PENSTOCK_ENGINE_PYTHON=/p is for PENSTOCK_ENGINE=vllm"),
        (
            {"KV_OFFLOADING_GB": "1", "ENGINE": "vllm"},
            "PENSTOCK_KV_OFFLOADING_GB=1.0 is for PENSTOCK_ENGINE=penstock",
        ),
        (
            {"KV_OFFLOADING_GB": "1", "RUNNER": "echo"},
            "PENSTOCK_KV_OFFLOADING_GB is not for PENSTOCK_RUNNER=echo",
        ),
        (
            {"KV_OFFLOADING_GB": "1", "PREFIX_CACHING": "false"},
            "PENSTOCK_KV_OFFLOADING_GB needs PENSTOCK_PREFIX_CACHING=true",
        ),
        (
            {"KV_OFFLOADING_DIR": "/kv"},
            "PENSTOCK_KV_OFFLOADING_DIR needs PENSTOCK_KV_OFFLOADING_GB",
        ),
        (
            {"KV_OFFLOADING_DIR": "/kv", "KV_OFFLOADING_GB": "1", "TENSOR_PARALLEL_SIZE": "2"},
            "PENSTOCK_KV_OFFLOADING_DIR is for PENSTOCK_TENSOR_PARALLEL_SIZE=1",
        ),
        (
            {"TENSOR_PARALLEL_SIZE": "2", "RUNNER": "echo"},
            "PENSTOCK_TENSOR_PARALLEL_SIZE is not for PENSTOCK_RUNNER=echo",
        ),
        (
            {"ENGINE": "vllm", "QUANTIZATION": "int8"},
            "PENSTOCK_QUANTIZATION=int8 is for PENSTOCK_ENGINE=penstock",
        ),
        (
            {"ENGINE": "vllm", "QUANTIZATION": "int4"},
            "PENSTOCK_QUANTIZATION=int4 is for PENSTOCK_ENGINE=penstock",
        ),
        (
            {"ENGINE": "vllm", "CPU_TIER": "native"},
            "PENSTOCK_CPU_TIER=native is for PENSTOCK_ENGINE=penstock",
        ),
        (
            {"ENGINE": "vllm", "LOOKAHEAD": "0"},
            "PENSTOCK_LOOKAHEAD=0 is for PENSTOCK_ENGINE=penstock",
        ),
        (
            {"ENGINE": "vllm", "MODEL_IMPL": "native"},
            "PENSTOCK_MODEL_IMPL=native is for PENSTOCK_ENGINE=penstock",
        ),
        ({"ENGINE": "vllm", "VLLM_ARGS": '{"dtype": "half"}'}, "'dtype' is set by PENSTOCK_DTYPE"),
        (
            {"ENGINE": "vllm", "VLLM_ARGS": '{"logits_processors": []}'},
            "'logits_processors' is set by the worker",
        ),
        (
            {"ENGINE": "vllm", "RUNNER": "echo"},
            "PENSTOCK_RUNNER=echo is for PENSTOCK_ENGINE=penstock",
        ),
        (
            {"VLLM_ARGS": '{"hf_token": "x", "seed": 1}'},
            "PENSTOCK_VLLM_ARGS with 'hf_token', 'seed' is for PENSTOCK_ENGINE=vllm",
        ),
        (
            {"ENGINE": "vllm", "VLLM_ARGS": "[1]"},
            "PENSTOCK_VLLM_ARGS cannot be used: must be a JSON",
        ),
        ({"ENGINE": "vllm", "VLLM_ARGS": "{"}, "PENSTOCK_VLLM_ARGS cannot be used: must be a JSON"),
    ],
)
def test_a_setting_of_another_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], sentence: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(variable_of(name), value)
    with pytest.raises(SettingsError) as caught:
        load_settings(WorkerSettings)
    assert sentence in str(caught.value)


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL")
    with pytest.raises(SettingsError, match="PENSTOCK_REDIS_URL is not set"):
        load_settings(WorkerSettings)


def test_a_bad_redis_url_is_refused_without_repeating_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "http://u:secret@h")
    with pytest.raises(SettingsError, match="PENSTOCK_REDIS_URL cannot be used") as caught:
        load_settings(WorkerSettings)
    assert "secret" not in str(caught.value)


def test_every_setting_has_a_description_and_every_number_its_bounds() -> None:
    for name, field in WorkerSettings.model_fields.items():
        assert field.description, name
        if field.annotation in (int, float, int | None, float | None):
            bounds = {type(item).__name__ for item in field.metadata}
            assert bounds & {"Ge", "Gt"}, name
            assert bounds & {"Le", "Lt"}, name


def test_a_bad_setting_ends_the_process_with_status_2_and_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker"],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "PENSTOCK_REDIS_URL": "redis://h",
            "PENSTOCK_MAX_NUM_SEQS": "none",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("penstock worker: PENSTOCK_MAX_NUM_SEQS='none' cannot be used: ")
    assert done.stderr.count("\n") == 1


def test_a_directory_is_served_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "Tiny-1B"
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    found = find_checkpoint(str(path), "")
    assert (found.path, found.name) == (path, "Tiny-1B")
    assert find_checkpoint(str(path), "mine").name == "mine"


def test_no_model_means_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr("worker.checkpoint.DEMO_CHECKPOINT", tmp_path)
    assert find_checkpoint("", "").name == DEMO_MODEL_NAME
    assert DEMO_CHECKPOINT.parts[-3:] == ("worker", "demo", "checkpoint")


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "not an id", "a/b/c", "../x"])
def test_a_model_that_is_nowhere_is_refused_with_its_name(model: str) -> None:
    with pytest.raises(CheckpointNotFound, match=r"nowhere|neither|\.\./x"):
        find_checkpoint(model, "")


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no config\.json"):
        find_checkpoint(str(tmp_path), "")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFound, match=r"no tokenizer\.json"):
        find_checkpoint(str(tmp_path), "")


def hub_sentence(hub_url: str, home: str, model: str = "acme/tiny", **more: str) -> str:
    """What a worker prints that finds no checkpoint: its hub and the hub's directory are given."""
    script = (
        "from worker.checkpoint import *\n"
        f"try:\n    print(find_checkpoint({model!r}, '').path)\n"
        "except CheckpointNotFound as e:\n    print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HF_ENDPOINT": hub_url, "HF_HOME": home, **more},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    return done.stdout


def test_a_cache_that_cannot_be_written_is_named_and_the_hub_is_not_blamed() -> None:
    with tiny_hub({"config.json": b"{}"}) as hub:
        sentence = hub_sentence(hub.url, "/dev/null/hub")  # root may write everywhere else
    assert "/dev/null/hub" in sentence
    assert "HF_HOME" in sentence
    assert "reached" not in sentence


def test_a_model_that_may_not_be_downloaded_is_refused_in_a_whole_sentence(tmp_path: Path) -> None:
    sentence = hub_sentence("http://127.0.0.1:1", str(tmp_path), HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids its download. Unset HF_HUB_OFFLINE" in sentence
    assert str(tmp_path) in sentence


def test_a_repository_of_gguf_files_needs_the_type_of_one() -> None:
    with pytest.raises(CheckpointNotFound, match=r"such as acme/tiny-GGUF:Q4_K_M"):
        find_checkpoint("acme/tiny-GGUF", "")


@pytest.mark.parametrize("name", ["./model.gguf", "model.Q4_K_M.gguf"])
def test_a_gguf_file_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(CheckpointNotFound, match=f"there is no file '{Path(name)}'"):
        find_checkpoint(name, "")


def test_a_directory_of_images_projectors_alone_has_no_model(tmp_path: Path) -> None:
    (tmp_path / "mmproj-model.gguf").touch()
    with pytest.raises(CheckpointNotFound, match="has no GGUF file of a whole model"):
        find_checkpoint(str(tmp_path), "")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Tiny-1B-Q4_K_M.gguf", "Tiny-1B-Q4_K_M"),
        ("/models/Tiny-1B-00001-of-00003.gguf", "Tiny-1B"),
        ("acme/tiny-GGUF:Q4_K_M", "acme/tiny-GGUF:Q4_K_M"),
        ("smollm2", "smollm2"),
    ],
)
def test_gguf_files_have_names_in_requests(model: str, name: str) -> None:
    assert served_name(model, "") == name
    assert served_name(model, "mine") == "mine"


def test_a_tokenizer_of_any_form_is_downloaded_and_weights_once(tmp_path: Path) -> None:
    wanted = {
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "chat_template.jinja",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
        "tekken.json",
        "tiktoken.model",
        "acme.tiktoken",
    }
    other = {
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "consolidated.safetensors.index.json",
        "original/params.json",
        "original/tokenizer.model",
        "pytorch_model.bin",
    }
    with tiny_hub(dict.fromkeys(sorted(wanted | other), b"{}")) as hub:
        found = hub_sentence(hub.url, str(tmp_path))
    snapshot = Path(found.strip())
    assert {str(f.relative_to(snapshot)) for f in snapshot.rglob("*") if f.is_file()} == wanted


def test_a_gguf_file_of_the_hub_is_fetched_by_its_type_alone(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "llama")
    files = {}
    for type_name in ("Q8_0", "F16"):
        write_gguf(checkpoint, tmp_path / f"{type_name}.gguf", type_name)
        files[f"tiny-{type_name}.gguf"] = (tmp_path / f"{type_name}.gguf").read_bytes()
    files |= {"config.json": b"{}", "Q4_0/tiny-Q4_0-00001-of-00002.gguf": b"GGUF"}
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with tiny_hub(files) as hub:
        found = hub_sentence(hub.url, str(tmp_path / "hub"), "acme/tiny:q8_0", **cache)
        fetched = {path.name for path in (tmp_path / "hub").rglob("*.*") if path.is_symlink()}
        shard = hub_sentence(hub.url, str(tmp_path / "hub"), "acme/tiny@main:Q4_0", **cache)
        none = hub_sentence(hub.url, str(tmp_path / "hub"), "acme/tiny:Q2_K", **cache)
    assert fetched == {"tiny-Q8_0.gguf"}
    assert {path.name for path in Path(found.strip()).glob("*.gguf")} == fetched
    assert json.loads((Path(found.strip()) / "config.json").read_text())["model_type"] == "llama"
    assert "tiny-Q4_0-00002-of-00002.gguf is missing" in shard
    assert none == "PENSTOCK_MODEL='acme/tiny:Q2_K': it has no GGUF file of the type 'Q2_K'.\n"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_why_a_cache_cannot_be_written_is_in_the_sentence(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def denied(*arguments: object, **options: object) -> str:
        raise OSError(code, os.strerror(code), "/cache/models--acme--tiny")

    monkeypatch.setattr("huggingface_hub.snapshot_download", denied)
    with pytest.raises(CheckpointNotFound, match="HF_HOME") as caught:
        find_checkpoint("acme/tiny", "")
    assert f"{os.strerror(code)} (/cache/models--acme--tiny)" in str(caught.value)


def test_without_a_network_a_hub_id_is_refused_in_one_sentence() -> None:
    sentence = hub_sentence("http://127.0.0.1:9", "/nonexistent")
    assert sentence.startswith("PENSTOCK_MODEL='acme/tiny' ")
    assert "reached" in sentence


@pytest.mark.parametrize("value", ["{", "[]", '{"max_tokens": 3}', '{"temperature": 9}'])
def test_an_unusable_sampling_override_is_reported_at_start(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PENSTOCK_OVERRIDE_GENERATION_CONFIG", value)
    with pytest.raises(SettingsError, match="OVERRIDE_GENERATION_CONFIG"):
        load_settings(WorkerSettings)


def test_an_override_of_the_sampling_is_a_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_OVERRIDE_GENERATION_CONFIG", '{"temperature": 0.2, "top_k": 5}')
    monkeypatch.setenv("PENSTOCK_GENERATION_CONFIG", "none")
    settings = load_settings(WorkerSettings)
    assert settings.generation_config == "none"


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/3", "a" * 40])
def test_a_revision_of_a_hub_model_is_fetched_and_is_no_part_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, revision: str
) -> None:
    asked: list[tuple[str, object]] = []

    def fetched(repository: str, **options: object) -> str:
        asked.append((repository, options["revision"]))
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert find_checkpoint(f"acme/tiny@{revision}", "").name == "acme/tiny"
    assert find_checkpoint("acme/tiny", "").name == "acme/tiny"
    assert asked == [("acme/tiny", revision), ("acme/tiny", None)]

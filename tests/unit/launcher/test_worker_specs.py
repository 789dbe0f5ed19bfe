"""The workers of `make run`: a file of models, its errors, and the shares of cores and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock.launcher import worker_specs as module
from penstock.launcher.settings import LauncherSettings
from penstock.launcher.worker_specs import WorkerSpec, worker_specs
from shared.environment import variable_of
from shared.settings import SettingsError

TWO = """
[[models]]
served_model_name = "small"
workers = 2

[[models]]
model = "/models/Qwen3-0.6B"
max_num_seqs = 8
prefix_caching = false
override_generation_config = {temperature = 0.6}
env = {CUDA_VISIBLE_DEVICES = "1"}
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "SERVED_MODEL_NAME", "WORKERS", "OMP_NUM_THREADS", "NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("DEVICE", "RUNNER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: False)


def specs_of(tmp_path: Path, text: str) -> list[WorkerSpec]:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return worker_specs(LauncherSettings(models_file=path))


def threads(specs: list[WorkerSpec]) -> list[str]:
    return [spec.own.get("PENSTOCK_NUM_THREADS", "") for spec in specs]


def test_each_table_is_a_model_with_its_own_settings(tmp_path: Path) -> None:
    first, second, third = specs_of(tmp_path, TWO)
    assert [spec.label for spec in (first, second, third)] == [
        "worker 0 (small)",
        "worker 1 (small)",
        "worker 2 (Qwen3-0.6B)",
    ]
    assert [spec.model for spec in (first, second, third)] == ["small", "small", "Qwen3-0.6B"]
    assert first.own["PENSTOCK_SERVED_MODEL_NAME"] == "small"
    assert third.own == {
        "PENSTOCK_MODEL": "/models/Qwen3-0.6B",
        "PENSTOCK_MAX_NUM_SEQS": "8",
        "PENSTOCK_PREFIX_CACHING": "false",
        "PENSTOCK_OVERRIDE_GENERATION_CONFIG": '{"temperature": 0.6}',
        "CUDA_VISIBLE_DEVICES": "1",
        "PENSTOCK_MEMORY_SHARE": "0.3333",
        "PENSTOCK_NUM_THREADS": third.own["PENSTOCK_NUM_THREADS"],
    }


@pytest.mark.promise(
    "Models: workers divide the cores and the memory of their device (of default sizes)"
)
def test_cores_are_divided_among_the_workers_of_all_models(tmp_path: Path) -> None:
    assert [int(number) for number in threads(specs_of(tmp_path, TWO))] == [2, 3, 3]
    fixed = TWO.replace("workers = 2", "workers = 2\nnum_threads = 1")
    assert threads(specs_of(tmp_path, fixed)) == ["1", "1", "6"]


def test_every_worker_has_a_thread_where_cores_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: 1)
    assert threads(specs_of(tmp_path, TWO)) == ["1", "1", "1"]


def test_workers_of_one_device_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(module, "num_cuda_devices", lambda: 2)
    text = TWO.replace("workers = 2", "workers = 2\ndevice = 'cuda:0'")
    small, _, on_a_gpu = specs_of(tmp_path, text)
    assert small.own["PENSTOCK_MEMORY_SHARE"] == "0.5"  # the third has a device of its own
    assert "PENSTOCK_MEMORY_SHARE" not in on_a_gpu.own
    sized = text.replace("workers = 2", "workers = 2\nkv_cache_memory_gb = 1.5")
    assert "PENSTOCK_MEMORY_SHARE" not in specs_of(tmp_path, sized)[0].own


@pytest.mark.parametrize(
    ("has_driver", "devices", "shares"),
    [
        (False, [("", None), ("cpu", None)], ["0.5", "0.5"]),
        (False, [("auto", "0"), ("", "1")], ["0.5", "0.5"]),
        (True, [("auto", None), ("cuda", None), ("cpu", None)], ["", "", ""]),
        (True, [("cuda:0", None), ("", "0"), ("", "1")], ["0.5", "0.5", ""]),
        (True, [("", "0,1"), ("", "1, 2"), ("", "3")], ["0.5", "0.5", ""]),
        (True, [("", "GPU-a"), ("", "GPU-b"), ("", "1")], ["0.5", "0.5", "0.3333"]),
        (True, [("", ""), ("auto", "-1"), ("", None)], ["0.5", "0.5", ""]),  # no GPU: the CPU
        (True, [("", "NoDevFiles"), ("", ""), ("", None)], ["0.5", "0.5", ""]),
    ],
)
def test_a_device_is_the_one_that_the_worker_takes(
    has_driver: bool,
    devices: list[tuple[str, str | None]],
    shares: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: has_driver)
    monkeypatch.setattr(module, "num_cuda_devices", lambda: 2)
    text = ""
    for number, (device, visible) in enumerate(devices):
        env = "" if visible is None else f"CUDA_VISIBLE_DEVICES = '{visible}'"
        text += f"[[models]]\nserved_model_name = 'm{number}'\nenv = {{{env}}}\n"
        text += f"device = '{device}'\n" if device else ""
    specs = specs_of(tmp_path, text)
    assert [spec.own.get("PENSTOCK_MEMORY_SHARE", "") for spec in specs] == shares


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives the machine so many CUDA devices."""
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: True)

    def set_number(number: int) -> None:
        monkeypatch.setattr(module, "num_cuda_devices", lambda: number)

    return set_number


def spread(specs: list[WorkerSpec]) -> list[tuple[str, str]]:
    """Returns the devices and the share of memory of each worker."""
    return [
        (spec.own.get("CUDA_VISIBLE_DEVICES", "all"), spec.own.get("PENSTOCK_MEMORY_SHARE", "1"))
        for spec in specs
    ]


def alike(workers: int) -> list[tuple[str, str]]:
    return spread(worker_specs(LauncherSettings(workers=workers)))


def test_each_worker_gets_a_cuda_device_of_its_own(
    cards: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(4)
    assert alike(1) == [("all", "1")]
    assert alike(2) == [("0", "1"), ("1", "1")]
    monkeypatch.setenv("PENSTOCK_TENSOR_PARALLEL_SIZE", "2")
    assert alike(2) == [("0,1", "1"), ("2,3", "1")]
    monkeypatch.delenv("PENSTOCK_TENSOR_PARALLEL_SIZE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert alike(2) == [("3", "1"), ("5", "1")]
    monkeypatch.setenv("PENSTOCK_DEVICE", "cpu")
    assert alike(9) == [("all", "0.1111")] * 9
    monkeypatch.setenv("PENSTOCK_DEVICE", "auto")
    monkeypatch.setenv("PENSTOCK_RUNNER", "echo")  # it takes no device
    assert alike(9) == [("all", "0.1111")] * 9


@pytest.mark.parametrize(
    ("num_cards", "environ", "workers", "sentence"),
    [
        (1, {}, 2, "worker 1 gets a CUDA device of its own, and none of 1 is left for it: start"),
        (2, {}, 3, "worker 2 gets a CUDA device of its own, and none of 2 is left for it: start"),
        (4, {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 2, "and none of 1 is left for it"),
        (
            3,
            {"PENSTOCK_TENSOR_PARALLEL_SIZE": "2"},
            2,
            r"gets 2 CUDA devices of its own \(PENSTOCK_TENSOR_PARALLEL_SIZE\), and 1 of 3 is left",
        ),
        (2, {"PENSTOCK_DEVICE": "cuda:2"}, 1, "worker 0: PENSTOCK_DEVICE=cuda:2: the CUDA devices"),
        (1, {"PENSTOCK_DEVICE": "cuda:1"}, 2, "cuda:1: the only CUDA device is cuda:0"),
        (
            2,
            {"PENSTOCK_DEVICE": "cuda:0", "CUDA_VISIBLE_DEVICES": ""},
            1,
            "there is no CUDA device",
        ),
    ],
)
def test_what_does_not_fit_the_cuda_devices_is_refused(
    num_cards: int,
    environ: dict[str, str],
    workers: int,
    sentence: str,
    cards: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards(num_cards)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=sentence):
        alike(workers)


def test_workers_share_the_device_that_is_named(
    cards: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cards(2)
    monkeypatch.setenv("PENSTOCK_DEVICE", "cuda:1")
    assert alike(3) == [("all", "0.3333")] * 3  # which the worker counts among all
    monkeypatch.delenv("PENSTOCK_DEVICE")
    named = """
    [[models]]
    served_model_name = "a"
    device = "cuda:0"
    workers = 2
    [[models]]
    served_model_name = "b"
    """
    assert spread(specs_of(tmp_path, named)) == [("all", "0.5"), ("all", "0.5"), ("1", "1")]
    cards(1)
    with pytest.raises(SettingsError, match=r"worker 2 \(b\) gets a CUDA device of its own"):
        specs_of(tmp_path, named)


def test_a_driver_that_does_not_answer_refuses_nothing(
    cards: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(0)
    assert alike(2) == [("all", "0.5"), ("all", "0.5")]
    monkeypatch.setenv("PENSTOCK_DEVICE", "cuda:1")
    assert alike(1) == [("all", "1")]


def test_devices_of_their_own_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(module, "num_cuda_devices", lambda: 4)
    specs = specs_of(tmp_path, TWO)
    assert [spec.own["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0", "2", "1"]


def test_alike_workers_without_a_file_share_too() -> None:
    specs = worker_specs(LauncherSettings(workers=3))
    assert [spec.label for spec in specs] == ["worker 0", "worker 1", "worker 2"]
    assert [dict(spec.own) for spec in specs] == [
        {"PENSTOCK_NUM_THREADS": number, "PENSTOCK_MEMORY_SHARE": "0.3333"}
        for number in ("2", "3", "3")
    ]
    (alone,) = worker_specs(LauncherSettings())
    assert alone.own == {}


def test_two_engines_may_serve_one_model(tmp_path: Path) -> None:
    text = """
    [[models]]
    model = "/m/Qwen"
    [[models]]
    model = "/m/Qwen"
    max_num_seqs = 4
    """
    assert [spec.model for spec in specs_of(tmp_path, text)] == ["Qwen", "Qwen"]


def test_what_one_engine_alone_has_reaches_the_tables_of_this_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "ENGINE_PYTHON": "/opt/vllm/bin/python",
        "VLLM_SAMPLER": "vllm",
        "CPU_TIER": "packed",
        "LOOKAHEAD": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(variable_of(name), value)
    text = '[[models]]\n[[models]]\nengine = "vllm"\nvllm_args = {enforce_eager = true}'
    own, vllm = specs_of(tmp_path, text)
    assert (own.engine, vllm.engine) == ("penstock", "vllm")
    assert {name: own.setting(name) for name in given} == {
        "ENGINE_PYTHON": "",  # its worker would refuse the launcher's
        "VLLM_SAMPLER": "",
        "CPU_TIER": "packed",
        "LOOKAHEAD": "1",
    }
    assert {name: vllm.setting(name) for name in given} == {
        "ENGINE_PYTHON": "/opt/vllm/bin/python",
        "VLLM_SAMPLER": "vllm",
        "CPU_TIER": "",
        "LOOKAHEAD": "",
    }
    assert vllm.own["PENSTOCK_VLLM_ARGS"] == '{"enforce_eager": true}'
    assert "PENSTOCK_VLLM_ARGS" not in own.own


def test_the_engine_of_the_environment_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENGINE", "vllm")
    monkeypatch.setenv("PENSTOCK_VLLM_SAMPLER", "vllm")
    own, vllm = specs_of(tmp_path, '[[models]]\nengine = "penstock"\n[[models]]')
    assert (own.setting("VLLM_SAMPLER"), vllm.setting("VLLM_SAMPLER")) == ("", "vllm")


@pytest.mark.parametrize(
    ("name", "value", "engine", "other"),
    [("VLLM_SAMPLER", "vllm", "penstock", "vllm"), ("CPU_TIER", "packed", "vllm", "penstock")],
)
def test_what_concerns_no_table_is_refused_and_not_ignored(
    name: str,
    value: str,
    engine: str,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable_of(name), value)
    with pytest.raises(SettingsError, match=f"{name}={value} is for PENSTOCK_ENGINE={other}"):
        specs_of(tmp_path, f"[[models]]\nengine = {engine!r}")


@pytest.mark.promise(
    "Models: a file of models that cannot be used is one sentence that names the table and the key"
)
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no table [[models]]"),
        ("models = 3", "has no table [[models]]"),
        ("models = [", "is no TOML"),
        ("workers = 2\n[[models]]", "'workers' is outside of [[models]]"),
        ("[[models]]\nmax_num_seq = 2", "no setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("[[models]]\nredis_url = 'redis://x'", "redis_url is the same for all workers"),
        ("[[models]]\nmax_num_seqs = 0", "[[models]] 1: PENSTOCK_MAX_NUM_SEQS='0' cannot be used"),
        ("[[models]]\nmax_num_seqs = [1]", "max_num_seqs must be a string, a number"),
        (
            "[[models]]\nserved_model_name = 'a b'",
            "PENSTOCK_SERVED_MODEL_NAME='a b' cannot be used",
        ),
        ("[[models]]\nworkers = 0", "workers must be a number from 1 to 64"),
        ("[[models]]\nworkers = true", "workers must be a number from 1 to 64"),
        ("[[models]]\nworkers = 40\n" * 2, "it repeats 'penstock-demo'; workers = 2"),
        ("[[models]]\nworkers = 64\n[[models]]\ndtype = 'float32'", "65 workers are more than 64"),
        ("[[models]]\nenv = {A = 1}", "env must be a table of strings"),
        (
            "[[models]]\nenv = {Penstock_Redis_Url = 'redis://x'}",
            "env: PENSTOCK_REDIS_URL is the same for all",
        ),
        (
            "[[models]]\nenv = {PENSTOCK_NAMESPACE = 'other'}",
            "env: PENSTOCK_NAMESPACE is the same for all",
        ),
        (
            "[[models]]\nenv = {PENSTOCK_MODEL = '/m/x'}",
            "env: PENSTOCK_MODEL is a setting: model = ",
        ),
        ("[[models]]\nenv = {Penstock_Dtype = 'x'}", "env: Penstock_Dtype is a setting: dtype = "),
        ("[[models]]\nenv = {'A=B' = 'x'}", "env: 'A=B' is no name of a variable"),
        ("[[models]]\nenv = {'' = 'x'}", "env: '' is no name of a variable"),
        ('[[models]]\nenv = {A = "x\\u0000"}', "env: A has a NUL character"),
        ('[[models]]\nmodel = "/m/b\\u0000c"', "model has a NUL character"),
        ("[[models]]\nmodel = '~nobody-has-this-name/x'", "model: Could not determine home"),
        (
            "[[models]]\nchat_template = '~nobody-has-this-name/x'",
            "PENSTOCK_CHAT_TEMPLATE='~nobody",
        ),
        ("[[models]]\nvllm_args = {a = [2026-01-01]}", "vllm_args has a date or a time, which"),
        (
            "[[models]]\nvllm_args = {hf_token = 'TOP'}",
            "PENSTOCK_VLLM_ARGS with 'hf_token' is for PENSTOCK_ENGINE=vllm",
        ),
        (
            "[[models]]\nvllm_sampler = 'vllm'",
            "PENSTOCK_VLLM_SAMPLER=vllm is for PENSTOCK_ENGINE=vllm",
        ),
        (
            "[[models]]\n[[models]]\nengine = 'vllm'\ncpu_tier = 'native'",
            "2: The settings do not fit together: PENSTOCK_CPU_TIER=native is for PENSTOCK_ENGINE=",
        ),
        ("[[models]]\nengine = ['vllm']", "engine must be a string"),
        ("[[models]]\nengine = 'vlm'", "PENSTOCK_ENGINE='vlm' cannot be used"),
        (
            "[[models]]\nmodel = '/a/x'\n[[models]]\nmodel = '/b/x'",
            "[[models]] 2: 'x' is the name of another model of this file; set served_model_name",
        ),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        specs_of(tmp_path, text)
    assert sentence in str(refused.value)
    assert "models.toml" in str(refused.value)
    assert "TOP" not in str(refused.value)  # a secret


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"PENSTOCK_MODELS_FILE='.*none.toml' cannot be read: No such"
    ):
        worker_specs(LauncherSettings(models_file=tmp_path / "none.toml"))


@pytest.mark.parametrize("given", [{"MODEL": "/m/x"}, {"WORKERS": "2"}])
def test_a_file_and_the_settings_of_one_model_exclude_each_other(
    given: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(variable_of(name), value)
    with pytest.raises(
        SettingsError, match=f"{next(iter(given))} and PENSTOCK_MODELS_FILE exclude"
    ):
        specs_of(tmp_path, TWO)

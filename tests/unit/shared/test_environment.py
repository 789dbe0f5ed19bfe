"""Names of variables: the prefix, unknown and misspelt ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from api.settings import ApiSettings
from penstock.launcher.settings import LauncherSettings, setting_names
from shared.environment import PREFIX, misspelling_warnings, name_warnings, value_of, variable_of
from shared.settings import SettingsError, load_settings
from tests.support.table import table
from worker.settings import WorkerSettings

REPOSITORY = Path(__file__).resolve().parents[3]
URL = {"PENSTOCK_REDIS_URL": "redis://x:1"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of nothing but a Redis, which processes would read."""
    found = dict(URL)
    monkeypatch.setattr("os.environ", found)
    return found


def warnings(environ: Mapping[str, str]) -> list[str]:
    return name_warnings(environ, setting_names())


def test_a_setting_is_the_variable_with_the_prefix(environ: dict[str, str]) -> None:
    environ |= {"PENSTOCK_PORT": "9000", "PENSTOCK_MODEL_RETENTION_S": "7"}
    settings = load_settings(ApiSettings)
    assert (settings.port, settings.model_retention_s) == (9000, 7.0)
    assert settings.redis_url == "redis://x:1"
    assert warnings(environ) == []


@pytest.mark.promise(
    "Command: the launcher warns once of each unknown or misspelt name of a setting; another "
    "program's `HOST` is not read"
)
def test_a_variable_without_the_prefix_is_another_programs_and_an_empty_one_is_the_default(
    environ: dict[str, str],
) -> None:
    environ |= {"HOST": "x86_64-conda-linux-gnu", "PORT": "1", "PENSTOCK_PORT": ""}
    settings = load_settings(LauncherSettings)
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert warnings(environ) == []


def test_a_bad_value_is_named_by_its_variable(environ: dict[str, str]) -> None:
    for name in ("PENSTOCK_PORT", "penstock_port"):
        environ[name] = "x"
        with pytest.raises(SettingsError, match=r"^PENSTOCK_PORT='x' cannot be used"):
            load_settings(ApiSettings)
        del environ[name]
    del environ["PENSTOCK_REDIS_URL"]
    with pytest.raises(SettingsError, match=r"^PENSTOCK_REDIS_URL is not set"):
        load_settings(ApiSettings)


def test_a_secret_is_not_repeated(environ: dict[str, str]) -> None:
    environ["PENSTOCK_REDIS_URL"] = "redisx://:s3cret@host"
    with pytest.raises(SettingsError, match=r"^PENSTOCK_REDIS_URL cannot be used") as refused:
        load_settings(ApiSettings)
    assert "s3cret" not in str(refused.value)


@table(
    ("name", "meant"),
    [
        ("PENSTOCK_MAX_NUM_SEQ", "PENSTOCK_MAX_NUM_SEQS"),
        ("PENSTOCK_PROT", "PENSTOCK_PORT"),
        ("PENSTOCK_KV_CACHE_MEMORY", "PENSTOCK_KV_CACHE_MEMORY_GB"),
        ("PENSTOCK_REDIS_URI", "PENSTOCK_REDIS_URL"),
        ("PENSTOCK_NOTHING_LIKE_IT", None),
    ],
)
def test_an_unknown_name_is_warned_of(name: str, meant: str | None) -> None:
    (sentence,) = warnings({name: "4"})
    assert sentence.startswith(f"{name} is not a setting")
    assert sentence.endswith(f"did you mean {meant}?" if meant else "is not a setting.")


@table("own", [ApiSettings, WorkerSettings])
def test_a_process_on_its_own_warns_of_misspellings_of_its_settings_alone(
    own: type[BaseSettings],
) -> None:
    """Settings of other processes may be in an environment that all share."""
    others = {variable_of(name): "1" for name in setting_names()}
    assert misspelling_warnings(others, own.model_fields) == []
    assert misspelling_warnings({"PENSTOCK_NOTHING_LIKE_IT": "1"}, own.model_fields) == []
    for name in own.model_fields:
        if len(name) > 7:
            (sentence,) = misspelling_warnings({variable_of(name[:-1]): "1"}, own.model_fields)
            assert sentence.endswith(f"did you mean {variable_of(name)}?")


@table(
    "name",
    [
        *("PATH", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "PWD", "USER", "LANG", "SHELL", "TERM"),
        *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "REDIS_HOST", "LOG_FILE", "MODELS"),
        *("PENSTOCK_SERVICE_HOST", "PENSTOCK_PORT_8000_TCP", "PENSTOCK_PORT_8000_TCP_ADDR"),
        *("PENSTOCK_URL", "PENSTOCK_KEY", "PENSTOCK_VLLM_PYTHON", "PENSTOCK_REPORT_FD"),
    ],
)
def test_other_names_are_left_alone(name: str) -> None:
    assert warnings({name: "x"}) == []


def test_the_links_of_a_service_named_penstock_are_no_settings(environ: dict[str, str]) -> None:
    links = {"PENSTOCK_PORT": "tcp://10.0.0.1:80", "PENSTOCK_REDIS_PORT": "tcp://10.0.0.2:6379"}
    environ |= links
    assert load_settings(ApiSettings).port == 8000
    assert warnings(environ) == []


def test_settings_are_found_by_their_names_in_small_letters_and_capitals() -> None:
    assert variable_of("port") == variable_of("PORT") == "PENSTOCK_PORT"
    for name in ("PENSTOCK_PORT", "penstock_port"):
        assert value_of("port", {name: "1"}) == value_of("PORT", {name: "1"}) == "1"
    assert value_of("port", {"PORT": "1", "PENSTOCK_PORT": ""}) == ""


def test_every_variable_that_the_tree_reads_is_known() -> None:
    read = {
        name
        for room in ("api", "worker", "shared", "penstock")
        for path in (REPOSITORY / room).rglob("*.py")
        if path != Path(__file__)
        for name in re.findall(r"environ\S*?\"(PENSTOCK_[A-Z_]+)\"", path.read_text())
    }
    assert read, "the pattern finds none"
    assert [sentence for name in read for sentence in warnings({name: "1"})] == []
    assert PREFIX == "PENSTOCK_"

"""Names of variables: the prefix, earlier names, unknown and misspelt ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.settings import ApiSettings
from penstock.launcher.settings import LauncherSettings
from shared.environment import PREFIX, adopt_prefix, name_warnings, value_of, variable_of
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


def test_a_setting_is_the_variable_with_the_prefix(environ: dict[str, str]) -> None:
    environ |= {"PENSTOCK_PORT": "9000", "PENSTOCK_MODEL_RETENTION_S": "7"}
    settings = load_settings(ApiSettings)
    assert (settings.port, settings.model_retention_s) == (9000, 7.0)
    assert settings.redis_url == "redis://x:1"
    assert name_warnings(environ) == []


def test_an_earlier_name_is_read_and_named(environ: dict[str, str]) -> None:
    environ |= {"MAX_NUM_SEQS": "4", "DTYPE": "float32", "prefix_caching": "false"}
    settings = load_settings(WorkerSettings)
    assert (settings.max_num_seqs, settings.dtype) == (4, "float32")
    assert not settings.prefix_caching
    (sentence,) = name_warnings(environ)
    for name in ("DTYPE", "MAX_NUM_SEQS", "PREFIX_CACHING"):
        assert f"PENSTOCK_{name}" in sentence
        assert re.search(rf"(?<!_){name}\b", sentence)


def test_the_prefix_has_precedence_and_an_empty_variable_is_the_default(
    environ: dict[str, str],
) -> None:
    # What conda's compilers set is nobody's host here.
    environ |= {"HOST": "x86_64-conda-linux-gnu", "PENSTOCK_HOST": "127.0.0.2", "PORT": "1"}
    environ["PENSTOCK_PORT"] = ""
    settings = load_settings(LauncherSettings)
    assert (settings.host, settings.port) == ("127.0.0.2", 8000)
    assert name_warnings(environ) == []


def test_a_bad_value_is_named_by_its_variable_and_as_it_was_written(
    environ: dict[str, str],
) -> None:
    for name, further in (
        ("PENSTOCK_PORT", ""),
        ("PORT", " It is set as PORT."),
        ("port", "port."),
    ):
        environ[name] = "x"
        with pytest.raises(SettingsError, match=r"^PENSTOCK_PORT='x' cannot be used") as refused:
            load_settings(ApiSettings)
        assert ("It is set as" in str(refused.value)) is bool(further)
        assert str(refused.value).endswith(further)
        del environ[name]
    del environ["PENSTOCK_REDIS_URL"]
    with pytest.raises(SettingsError, match=r"^PENSTOCK_REDIS_URL is not set"):
        load_settings(ApiSettings)


def test_a_secret_is_not_repeated_under_either_name(environ: dict[str, str]) -> None:
    for name in ("PENSTOCK_REDIS_URL", "REDIS_URL"):
        environ.clear()
        environ[name] = "redisx://:s3cret@host"
        with pytest.raises(SettingsError, match=r"^PENSTOCK_REDIS_URL cannot be used") as refused:
            load_settings(ApiSettings)
        assert "s3cret" not in str(refused.value)


@table(
    ("name", "meant"),
    [
        ("PENSTOCK_MAX_NUM_SEQ", "PENSTOCK_MAX_NUM_SEQS"),
        ("PENSTOCK_PROT", "PENSTOCK_PORT"),
        ("PENSTOCK_KV_CACHE_MEMORY", "PENSTOCK_KV_CACHE_MEMORY_GB"),
        ("PENSTOCK_URI", "PENSTOCK_URL"),
        ("PENSTOCK_NOTHING_LIKE_IT", None),
        ("DTPYE", "PENSTOCK_DTYPE"),
        ("MAX_NUM_SEQ", "PENSTOCK_MAX_NUM_SEQS"),
        ("REDIS_URI", "PENSTOCK_REDIS_URL"),
        ("MAX_NUM_SEQQS", "PENSTOCK_MAX_NUM_SEQS"),
        ("NUM_THREDAS", "PENSTOCK_NUM_THREADS"),
    ],
)
def test_an_unknown_name_is_warned_of(name: str, meant: str | None) -> None:
    (sentence,) = name_warnings({name: "4"})
    assert sentence.startswith(f"{name} is no setting")
    assert sentence.endswith(f"did you mean {meant}?" if meant else "is no setting.")


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
    assert name_warnings({name: "x"}) == []


def test_the_links_of_a_service_named_penstock_are_no_settings(environ: dict[str, str]) -> None:
    links = {"PENSTOCK_PORT": "tcp://10.0.0.1:80", "PENSTOCK_REDIS_PORT": "tcp://10.0.0.2:6379"}
    environ |= links
    assert load_settings(ApiSettings).port == 8000
    assert name_warnings(environ) == []


def test_a_near_miss_beside_the_setting_itself_is_somebody_elses() -> None:
    assert name_warnings({"REDIS_URI": "x", "PENSTOCK_REDIS_URL": "redis://x:1"}) == []
    assert name_warnings({"MAX_NUM_SEQ": ""}) == []


def test_the_environment_of_children_has_the_prefix_alone() -> None:
    environ = {"PORT": "9000", "MODEL": "x", "PENSTOCK_MODEL": "y", "PATH": "/bin"}
    (sentence,) = adopt_prefix(environ)
    assert environ == {
        "PENSTOCK_PORT": "9000",
        "MODEL": "x",
        "PENSTOCK_MODEL": "y",
        "PATH": "/bin",
    }
    assert sentence.startswith("PORT: settings have the prefix")
    assert adopt_prefix(environ) == []


def test_settings_are_found_by_their_names_in_small_letters_and_capitals() -> None:
    assert variable_of("port") == variable_of("PORT") == "PENSTOCK_PORT"
    for name in ("PENSTOCK_PORT", "penstock_port", "PORT", "port"):
        assert value_of("port", {name: "1"}) == value_of("PORT", {name: "1"}) == "1"


def test_every_variable_that_the_tree_reads_is_known() -> None:
    read = {
        name
        for room in ("api", "worker", "shared", "penstock", "tests")
        for path in (REPOSITORY / room).rglob("*.py")
        if path != Path(__file__)
        for name in re.findall(r"environ\S*?\"(PENSTOCK_[A-Z_]+)\"", path.read_text())
    }
    assert read, "the pattern finds none"
    assert [sentence for name in read for sentence in name_warnings({name: "1"})] == []
    assert PREFIX == "PENSTOCK_"

"""The application `penstock`: flags of settings, exit codes, completion, what it imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from api.settings import ApiSettings
from penstock.cli import start
from penstock.cli.application import application, main
from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.flags import COMMON
from penstock.cli.service import client_of
from penstock.client import Client
from penstock.launcher.settings import LauncherSettings
from shared.environment import variable_of
from tests.support.table import table
from worker.settings import WorkerSettings

pytestmark = pytest.mark.usefixtures("own_environment")

REPOSITORY = Path(__file__).resolve().parents[3]
SETTINGS = {
    "up": (LauncherSettings, WorkerSettings, ApiSettings),
    "api": (ApiSettings,),
    "worker": (WorkerSettings,),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that this process would have become."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: found.append(words))
    return found


@pytest.mark.promise("Command: every setting has a flag")
@pytest.mark.parametrize("command", SETTINGS)
def test_every_setting_has_a_flag_with_its_variable(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main([command, "--help-all"]) == ExitCode.OK
    shown = capsys.readouterr().out
    for settings in SETTINGS[command]:
        for name in settings.model_fields:
            if name == "model":  # the argument
                continue
            assert re.search(rf"--{name.replace('_', '-')}\b", shown), name
            assert f" {variable_of(name)} " in shown, name


@pytest.mark.parametrize("command", SETTINGS)
def test_help_fits_a_page_and_names_the_flag_that_lists_the_rest(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([command, "--help"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert 8 <= len(re.findall(r"^│ --[a-z]", shown, re.M)) <= 18
    assert "--help-all" in shown
    assert "…" not in shown, "a name that is cut cannot be set"
    if command == "up":
        for panel, names in COMMON.items():
            for name in names if panel != "Settings" else ():
                assert f"--{name.replace('_', '-')} " in shown, name


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield (*words, name), command
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


@pytest.mark.promise(
    "Command: with `--json` stdout has JSON alone; exit codes are those of the page"
)
def test_every_command_has_json() -> None:
    found = dict(commands(typer.main.get_command(application())))
    asked = ["up", "api", "worker", "doctor"]
    asked += ["status", "workers", "top", "logs", "chat", "generate"]
    asked += ["bench", "capacity"]
    listed = [("jobs", name) for name in ("list", "show", "follow", "cancel", "requeue")]
    listed += [("keys", "new"), ("keys", "list"), ("workers", "drain"), ("workers", "resume")]
    listed += [("models", name) for name in ("list", "pause", "resume")]
    assert {*((name,) for name in asked), *listed, ("dead-letters", "requeue")} == set(found)
    for words, command in found.items():
        assert any("--json" in parameter.opts for parameter in command.params), words
        assert command.help, words


@table("option", [("--url", "http://127.0.0.1:2"), ("--key", "x"), ("--json",)])
def test_an_option_of_the_group_before_a_subcommand_is_refused(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(Client, "call", lambda *given, **_: called.append(given))
    assert main(["workers", *option, "drain", "w"]) == ExitCode.UNUSABLE
    assert called == []
    assert f"give {option[0]} after `drain`" in capsys.readouterr().err


def test_ctrl_c_has_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "call", interrupted)
    assert main(["status"]) == ExitCode.INTERRUPTED


def test_flags_become_variables_of_what_is_started(started: list[list[str]]) -> None:
    words = ["up", "/models/x", "--port", "9000", "--no-prefix-caching", "--max-num-seqs", "4"]
    assert main([*words, "--runner", "echo"]) == ExitCode.OK
    (command,) = started
    assert command[1:] == ["-m", "penstock.launcher"]
    given = {"port": "9000", "prefix_caching": "false", "max_num_seqs": "4", "model": "/models/x"}
    assert {name: os.environ[variable_of(name)] for name in given} == given
    assert os.environ["PYTHONSAFEPATH"] == "1"
    assert str(REPOSITORY) in os.environ["PYTHONPATH"].split(os.pathsep)


def test_json_is_what_logs_and_the_ready_line_are_written_in(started: list[list[str]]) -> None:
    assert main(["up", "--json", "--runner", "echo"]) == ExitCode.OK
    assert os.environ[variable_of("log_format")] == "json"
    assert os.environ[variable_of("ready_format")] == "json"


@table("command", ["api", "worker"])
def test_a_process_replaces_the_command(command: str, started: list[list[str]]) -> None:
    assert main([command, "--redis-url", "redis://x:1"]) == ExitCode.OK
    assert started[-1] == [sys.executable, "-m", command]
    assert os.environ[variable_of("redis_url")] == "redis://x:1"


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "_OF_FRONTENDS", ("fastapi", "no_such_package"))
    assert main(["api"]) == ExitCode.UNUSABLE
    assert started == []
    assert "no_such_package is not installed: pip install 'penstock[api]'" in (
        capsys.readouterr().err
    )


def test_commands_that_ask_a_service_import_no_part_of_it() -> None:
    """Half a second at most on an idle machine; here by what is loaded."""
    code = (
        "import sys, json; from penstock.cli.application import main; main(['status', '--url', "
        "'http://127.0.0.1:1']); print(json.dumps(sorted(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    modules = set(json.loads(ended.stdout)) - {"shared", "shared.printable"}  # all that it is
    loaded = {name.partition(".")[0] for name in modules}
    heavy = {"torch", "numpy", "fastapi", "redis", "pydantic_settings", "api", "worker", "shared"}
    assert loaded & heavy == set()


def complete(words: str) -> str:
    """What the shell would offer, for the word that is begun."""
    return subprocess.run(
        [sys.executable, "-m", "penstock"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "_PENSTOCK_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_commands_and_flags_are_completed() -> None:
    assert set(complete("penstock ").split()) >= {"up", "jobs", "chat", "status", "doctor"}
    assert set(complete("penstock jobs ").split()) >= {"list", "show", "follow", "cancel"}
    assert "--max-num-seqs" in complete("penstock up --max-num").split()


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(CommandError) as refused:
        client_of("ftp://x", None)
    assert refused.value.code == ExitCode.UNUSABLE


def test_every_exit_code_has_a_meaning() -> None:
    assert all(code.meaning for code in ExitCode)


def test_an_answer_that_is_no_frontends_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: Any, **__: Any) -> Any:
        return ["not", "ours"]

    monkeypatch.setattr(Client, "call", answer)
    assert main(["status"]) == ExitCode.NO_SERVICE
    assert "no frontend of Penstock" in capsys.readouterr().err

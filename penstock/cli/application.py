"""The application `penstock`: its commands, and what an error in one of them ends with."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.start import start_frontend, start_service, start_worker

Model = Annotated[
    str | None,
    typer.Argument(help="Checkpoint directory or hub id. Without it: the demo model, or MODEL."),
]


def application() -> typer.Typer:
    """Returns the application."""
    app = typer.Typer(
        name="penstock",
        help="Large language models, served from a durable queue.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("up")(up)
    app.command("api")(api)
    app.command("worker")(worker)
    return app


def up(model: Model = None) -> None:
    """Starts Redis, a worker and a frontend on this machine. Ctrl-C stops everything."""
    _choose(model)
    start_service()


def api() -> None:
    """Starts one frontend, for the Redis of REDIS_URL."""
    start_frontend()


def worker(model: Model = None) -> None:
    """Starts one worker, for the Redis of REDIS_URL."""
    _choose(model)
    start_worker()


def _choose(model: str | None) -> None:
    if model is not None:
        os.environ["MODEL"] = model


def main() -> int:
    """Runs the command of this process's arguments; returns its exit code."""
    try:
        application()(standalone_mode=False)
    except CommandError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return error.code
    return ExitCode.OK

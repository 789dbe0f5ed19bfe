"""`penstock up`, `api` and `worker`: this process becomes a launcher, a frontend or a worker."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import NoReturn

from penstock.cli.exits import CommandError, ExitCode
from penstock.rooms import reach_rooms, rooms_directory

# What each process imports first of the packages that an extra brings.
_OF_FRONTENDS = ("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client")
_OF_WORKERS = ("huggingface_hub", "uvloop", "prometheus_client")
_OF_ENGINES = ("torch", "transformers", "safetensors", "numpy")


def become(module: str, extra: str, packages: tuple[str, ...]) -> NoReturn:
    """Replaces this process by `python -m module`, with the environment as it is now.

    Raises CommandError where a package that it needs is not installed.
    """
    reach_rooms()
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"{', '.join(missing)} is not installed: pip install 'penstock[{extra}]', "
            f"or uvx --from 'penstock[{extra}]' penstock.",
            ExitCode.UNUSABLE,
        )
    room = module.partition(".")[0]
    if room != "penstock" and not (rooms_directory() / room).is_dir():
        raise CommandError(f"this installation has no package {room!r}.", ExitCode.UNUSABLE)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module])


def start_service() -> NoReturn:
    """Becomes the launcher: a Redis, workers and frontends."""
    become("penstock.launcher", "worker", (*_OF_FRONTENDS, *_of_worker()))


def start_frontend() -> NoReturn:
    """Becomes one frontend."""
    become("api", "api", _OF_FRONTENDS)


def start_worker() -> NoReturn:
    """Becomes one worker."""
    become("worker", "worker", _of_worker())


def _of_worker() -> tuple[str, ...]:
    """Returns what a worker needs: PyTorch not where another interpreter computes, or nothing."""
    reach_rooms()
    from shared.environment import value_of

    engine, runner = value_of("engine", os.environ), value_of("runner", os.environ)
    computes_here = engine in ("", "penstock") and runner != "echo"
    if value_of("models_file", os.environ) or not computes_here:
        return _OF_WORKERS
    return (*_OF_WORKERS, *_OF_ENGINES)

"""A flag for each setting: `--max-model-len 4096` is the variable of that name, set for what the
command starts.

Flags are checked where all settings are: by the process that reads them, with its sentence.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape

from penstock.cli.options import PREFIX
from penstock.rooms import reach_rooms

# By command: the settings classes of what it starts (module, class), and the panel of its help.
_CLASSES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "up": (
        ("penstock.launcher.settings", "LauncherSettings", "Service"),
        ("worker.settings", "WorkerSettings", "Workers"),
        ("api.settings", "ApiSettings", "Frontends"),
    ),
    "api": (("api.settings", "ApiSettings", "Settings"),),
    "worker": (("worker.settings", "WorkerSettings", "Settings"),),
}
_CLASSES["doctor"] = _CLASSES["up"]
HELP_ALL = "--help-all"
# Flags of `--help`, by panel; `--help-all` lists the others too.
COMMON = {
    "Service": ("host", "port", "workers", "frontends", "models_file", "data_dir", "listen_redis"),
    "Workers": ("engine", "device", "dtype", "quantization", "max_model_len", "max_num_seqs"),
    "Frontends": ("api_keys_file",),
    "Settings": (
        *("redis_url", "host", "port", "api_keys_file", "log_level", "engine", "device", "dtype"),
        *("quantization", "max_model_len", "max_num_seqs", "served_model_name", "metrics_port"),
    ),
}


def with_flags(
    name: str, command: Callable[..., None], *, shows_all: bool = True
) -> Callable[..., None]:
    """Returns the command `name` with a flag for each setting of what it starts. Without
    `shows_all` its help lists the common ones."""
    variables: dict[str, str] = {}  # by parameter
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    own = {parameter.name for parameter in parameters}
    for module, class_name, panel in _CLASSES[name]:
        for setting, field in _fields(module, class_name).items():
            if setting in own or f"set_{setting}" in variables:
                continue
            variables[f"set_{setting}"] = PREFIX + setting.upper()
            is_shown = shows_all or setting in COMMON[panel]
            parameters.append(_parameter(setting, field, panel, is_shown=is_shown))

    parameters.append(
        inspect.Parameter(
            "help_all",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool, typer.Option(HELP_ALL, help="Show the flags of all settings, and exit.")
            ],
        )
    )

    @functools.wraps(command)
    def flagged(**values: Any) -> None:
        del values["help_all"]  # `main` has made it --help
        for parameter, variable in variables.items():
            value = values.pop(parameter)
            if value is not None:
                os.environ[variable] = str(value).lower() if isinstance(value, bool) else value
        command(**values)

    flagged.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flagged.__annotations__ = {p.name: p.annotation for p in parameters}
    return flagged


def _fields(module: str, class_name: str) -> dict[str, Any]:
    """Returns the fields of a settings class; none where its package is not installed."""
    reach_rooms()
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return {}
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("api", "worker", "shared"):
            raise
        return {}  # of an extra that is not installed; the command reports it when it is run
    fields: dict[str, Any] = getattr(loaded, class_name).model_fields
    return fields


def _parameter(setting: str, field: Any, panel: str, *, is_shown: bool) -> inspect.Parameter:
    flag = f"--{setting.replace('_', '-')}"
    is_switch = field.annotation is bool
    option = typer.Option(
        f"{flag}/--no-{setting.replace('_', '-')}" if is_switch else flag,
        help=escape(_help(setting, field)),
        metavar=None if is_switch else "VALUE",
        rich_help_panel=panel,
        hidden=not is_shown,
    )
    kind: Any = bool | None if is_switch else str | None
    return inspect.Parameter(
        f"set_{setting}",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, option],
    )


def _help(setting: str, field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    known = field.is_required() or default is None or default == ""
    shown = "" if known else f" Default: {default}."
    return f"{field.description}{shown}\n\n{PREFIX}{setting.upper()}"

"""The environment variables of settings: `max_num_seqs` is PENSTOCK_MAX_NUM_SEQS."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

PREFIX = "PENSTOCK_"
# Variables of the command, of `make`, and those that a process sets for its children.
_NO_SETTINGS = frozenset({"URL", "KEY", "VLLM_PYTHON", "REPORT_FD", "PROCESS", "LLGUIDANCE"})
# Kubernetes sets these for a Service named `penstock`: PENSTOCK_PORT is then an address.
_LINK_NAME = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT)|PORT_\d+)\w*")
_LINK = re.compile(r"(tcp|udp|sctp)://")
SIMILAR = 0.75  # ratio of difflib from which a name is a misspelling of another
# The same in a process that knows its own settings alone: some of other processes are similar.
VERY_SIMILAR = 0.88


def variable_of(setting: str) -> str:
    """Returns the variable of a setting, whose name may be in capitals."""
    return PREFIX + setting.upper()


def value_of(setting: str, environ: Mapping[str, str]) -> str:
    """Returns a setting's value; "" if its variable is empty or not set. Case does not matter."""
    variable = variable_of(setting)
    return environ.get(variable) or next(
        (value for name, value in environ.items() if value and name.upper() == variable), ""
    )


def is_link(value: str) -> bool:
    """Returns whether a value is the address that Kubernetes and Docker set for a service."""
    return _LINK.match(value) is not None


def name_warnings(environ: Mapping[str, str], settings: Iterable[str]) -> list[str]:
    """Returns a sentence for each variable with the prefix that is not one of `settings`."""
    return [
        f"{name} is not a setting" + (f"; did you mean {variable_of(meant)}?" if meant else ".")
        for name, meant in _unknown(environ, settings, SIMILAR)
    ]


def misspelling_warnings(environ: Mapping[str, str], settings: Iterable[str]) -> list[str]:
    """Returns a sentence for each variable that misspells one of `settings`.

    Other unknown variables may be settings of another process that shares the environment.
    """
    return [
        f"{name} is not a setting; did you mean {variable_of(meant)}?"
        for name, meant in _unknown(environ, settings, VERY_SIMILAR)
        if meant
    ]


def _unknown(
    environ: Mapping[str, str], settings: Iterable[str], similarity: float
) -> list[tuple[str, str]]:
    """Returns each unknown variable with the prefix, and the setting that it resembles or ""."""
    known = {setting.upper() for setting in settings}
    found = []
    for variable in sorted(environ):
        name = variable.upper().removeprefix(PREFIX)
        is_ours = variable.startswith(PREFIX) and environ[variable]
        if not is_ours or name in known | _NO_SETTINGS:
            continue
        if not _LINK_NAME.fullmatch(name) and not is_link(environ[variable]):
            close = difflib.get_close_matches(name, known, 1, similarity)
            found.append((variable, close[0] if close else ""))
    return found

"""The variables that settings are read from: their prefix, their earlier names, misspelt ones.

A setting `max_num_seqs` is the variable PENSTOCK_MAX_NUM_SEQS. Until release 0.1 it was
MAX_NUM_SEQS, which is still read where the one with the prefix is not set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, MutableMapping

from shared.setting_names import SETTING_NAMES

PREFIX = "PENSTOCK_"
# Variables with the prefix that are no settings: of the command, of `make` and the tests, and those
# that processes hand to their children.
_OTHERS = frozenset(
    {
        "PENSTOCK_URL",
        "PENSTOCK_KEY",
        "PENSTOCK_REPORT_FD",
        "PENSTOCK_PROCESS",
        "PENSTOCK_LLGUIDANCE",
        "PENSTOCK_VLLM_PYTHON",
        "PENSTOCK_EXAMPLES",
        "PENSTOCK_TEST_DEVICE",
        "PENSTOCK_WALK_STEPS",
        "PENSTOCK_WALK_SEED",
        "PENSTOCK_MODEL_FAULTS",
        "PENSTOCK_SIM_FIRST_SEED",
        "PENSTOCK_SIM_SEEDS",
        "PENSTOCK_STORM_S",
    }
)
# What Kubernetes and Docker's links say of a service or a container with the name `penstock`:
# PENSTOCK_PORT is then an address.
_OF_LINKS = re.compile(r"PENSTOCK_(\w+_)?(SERVICE_(HOST|PORT)|PORT_\d+|NAME|ENV_)\w*")
_LINK = re.compile(r"(tcp|udp|sctp)://")
# Names of others, one letter from a setting's.
_NO_NEAR_MISSES = frozenset({"HOSTS", "POST", "PORTS", "MODE", "MODELS", "DEVICES", "WORKER"})
MIN_NEAR_LENGTH = 6


def variable_of(setting: str) -> str:
    """Returns the variable of a setting, which is named as its field or in capitals."""
    return PREFIX + setting.upper()


def value_of(setting: str, environ: Mapping[str, str]) -> str:
    """Returns a setting's value: of its variable where there is one, else of its earlier name; ""
    where it has none. An empty variable hides the earlier name."""
    name = given_name(setting, environ)
    return "" if name is None else environ[name]


def given_name(setting: str, environ: Mapping[str, str]) -> str | None:
    """Returns the name under which the environment has a setting, in small letters too; None where
    it has not."""
    for name in (variable_of(setting), setting.upper()):
        for spelt in (name, name.lower()):
            if spelt in environ and not _LINK.match(environ[spelt]):
                return spelt
    return None


def adopt_prefix(environ: MutableMapping[str, str]) -> list[str]:
    """Gives settings that have their earlier names those with the prefix, for all processes that
    inherit the environment. Returns sentences about names for the operator."""
    sentences = name_warnings(environ)
    for name in _earlier(environ):
        environ[PREFIX + name.upper()] = environ.pop(name)
    return sentences


def name_warnings(environ: Mapping[str, str]) -> list[str]:
    """Returns a sentence for all earlier names, one for each unknown name with the prefix, and one
    for each name that is a letter from a setting's earlier one."""
    found = []
    if earlier := [name.upper() for name in _earlier(environ)]:
        found.append(
            f"{', '.join(earlier)}: settings have the prefix {PREFIX} now; their earlier names "
            f"will not be read for ever: {', '.join(PREFIX + name for name in earlier)}."
        )
    known = {PREFIX + name for name in SETTING_NAMES} | _OTHERS
    for name in sorted(environ):
        if name.upper() in known or not environ[name]:
            continue
        if name.startswith(PREFIX):
            if not _OF_LINKS.fullmatch(name) and not _LINK.match(environ[name]):
                found.append(_unknown(name, known))
        elif (meant := _near(name)) and PREFIX + meant not in environ and meant not in environ:
            found.append(f"{name} is no setting; did you mean {PREFIX + meant}?")
    return found


def _earlier(environ: Mapping[str, str]) -> list[str]:
    """Returns the names without the prefix that settings are read from."""
    given = (given_name(name, environ) for name in sorted(SETTING_NAMES))
    return [
        name for name in given if name and not name.upper().startswith(PREFIX) and environ[name]
    ]


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.8)
    return f"{name} is no setting" + (f"; did you mean {close[0]}?" if close else ".")


def _near(name: str) -> str | None:
    """Returns the setting from which a name differs by one letter that is missing, too many, wrong
    or exchanged with its neighbour; None for other names, and short ones."""
    if len(name) < MIN_NEAR_LENGTH - 1 or name in _NO_NEAR_MISSES or name in SETTING_NAMES:
        return None
    for setting in difflib.get_close_matches(name, SETTING_NAMES, 3, 0.75):
        if len(setting) >= MIN_NEAR_LENGTH - 1 and _is_one_slip(name, setting):
            return setting
    return None


def _is_one_slip(one: str, other: str) -> bool:
    begin = 0
    while begin < min(len(one), len(other)) and one[begin] == other[begin]:
        begin += 1
    left, right = one[begin:], other[begin:]
    return (
        left[1:] == right[1:]
        or left[1:] == right
        or left == right[1:]
        or (left[:2] == right[:2][::-1] and left[2:] == right[2:])
    )

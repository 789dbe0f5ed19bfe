"""Checks of the libraries whose internals Penstock uses, each in one `*_compat` module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from re import match
from types import FunctionType


class IncompatibleLibrary(ValueError):
    """An installed library cannot be used. The sentence names its version and what it lacks."""


def check_library(tried: str, uses: Mapping[type, Sequence[str]]) -> None:
    """Raises IncompatibleLibrary where a class lacks a name that Penstock overrides or uses.

    `tried`: the requirement of the versions that Penstock was tried with. A name is there where the
    class has it, or where a method of it has it: attributes of instances.
    """
    missing = [
        f"{owner.__name__}.{name}" for owner in uses for name in _missing(owner, uses[owner])
    ]
    if missing:
        found = match(r"[\w-]+", tried)
        assert found is not None, "a requirement begins with the package"
        raise IncompatibleLibrary(
            f"{found[0]} {version(found[0])} is not one that Penstock was tried with: it lacks "
            f"{', '.join(missing)}. Install one that was: pip install '{tried}'"
        )


def _missing(owner: type, names: Sequence[str]) -> Iterator[str]:
    known = set(dir(owner))
    for base in owner.__mro__:
        for member in vars(base).values():
            if isinstance(member, FunctionType):
                known.update(member.__code__.co_names)
    return (name for name in names if name not in known)

"""Checks of the libraries whose internals Penstock uses, each in one `*_compat` module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from re import match
from types import FunctionType


class IncompatibleLibrary(ValueError):
    """An installed library cannot be used. The sentence names its version and what it lacks."""

    def __init__(self, tried: str, reason: str, installed: str | None = None) -> None:
        """`tried`: the requirement of the versions that Penstock was tried with."""
        found = match(r"[\w-]+", tried)
        assert found is not None, "a requirement begins with the package"
        super().__init__(
            f"{found[0]} {installed or version(found[0])} is not one that Penstock was tried with: "
            f"{reason}. Install one that was: pip install '{tried}'"
        )


def check_library(
    tried: str, uses: Mapping[type, Sequence[str]], installed: str | None = None
) -> None:
    """Raises IncompatibleLibrary where a class lacks a name that Penstock overrides or uses.

    `tried`: the requirement of the versions that Penstock was tried with. `installed`: the version,
    where the package's metadata does not have it.
    """
    missing = [
        f"{each.__name__}.{name}" for each in uses for name in missing_names(each, uses[each])
    ]
    if missing:
        raise IncompatibleLibrary(tried, f"it lacks {', '.join(missing)}", installed)


def missing_names(owner: type, names: Sequence[str]) -> Iterator[str]:
    """Returns those that neither the class nor the code of its methods has, where attributes of
    instances are."""
    known = set(dir(owner))
    for base in owner.__mro__:
        for member in vars(base).values():
            if isinstance(member, FunctionType):
                known.update(member.__code__.co_names)
    return (name for name in names if name not in known)

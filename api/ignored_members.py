"""Takes out of a request's body what changes nothing, and keeps what was ignored of it.

The list is in `api.unused_members`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from api.errors import unsupported
from api.unused_members import LIST, UNUSED_MEMBERS, UnusedMember

HEADER = "x-penstock-ignored"

Rows = tuple[UnusedMember, ...]


def _by_dialect() -> dict[str, dict[str, Rows]]:
    found: dict[str, dict[str, Rows]] = {}
    for row in UNUSED_MEMBERS:
        first = row.path.removesuffix(LIST).partition(".")[0]
        for dialect in row.dialects:
            rows = found.setdefault(dialect, {})
            rows[first] = (*rows.get(first, ()), row)
    return found


_ROWS = _by_dialect()


def rows_of(dialect: str) -> Mapping[str, Rows]:
    """The rows of a dialect by the top-level member that they are about."""
    return _ROWS.get(dialect, {})


class IgnoredMembers:
    """What one request has that is ignored; with `refuse` such a request is refused.

    `names` are paths of the list, each once: few and short, whatever the request is.
    """

    def __init__(self, *, refuse: bool = False) -> None:
        self.names: list[str] = []
        self._refuse = refuse

    @property
    def text(self) -> str | None:
        """The value of the header `x-penstock-ignored`; None: nothing was ignored."""
        return ", ".join(self.names) or None

    def rest(self, rows: Rows, name: str, value: Any) -> Any | None:
        """Returns what is left of the value of member `name`; None where that is nothing. The value
        stays as it is. Raises InvalidParameter where nothing may be ignored."""
        for row in rows:
            if row.path == name:
                if row.values.have(value):
                    self._take(row, name)
                    return None
            elif row.path == f"{name}{LIST}":
                if isinstance(value, list):
                    value = self._rest_of_list(row, name, value)
            elif isinstance(value, dict):
                inner = row.path.removeprefix(f"{name}.")
                if inner in value and row.values.have(value[inner]):
                    self._take(row, row.path)
                    value = {key: kept for key, kept in value.items() if key != inner}
        return value

    def _rest_of_list(self, row: UnusedMember, name: str, value: list[Any]) -> list[Any]:
        kept = []
        for index, entry in enumerate(value):
            if row.values.have(entry):
                self._take(row, f"{name}.{index}")
            else:
                kept.append(entry)
        return kept

    def _take(self, row: UnusedMember, at: str) -> None:
        if not row.is_told:
            return
        if self._refuse:
            raise unsupported(at, f"it changes nothing here ({row.why})")
        name = row.path.removesuffix(LIST)
        if name not in self.names:
            self.names.append(name)


def tell_ignored(scope: Scope, ignored: IgnoredMembers) -> None:
    """Sets the answer's header, if anything was ignored."""
    if ignored.text is not None:
        scope.setdefault("state", {})["ignored"] = ignored.text

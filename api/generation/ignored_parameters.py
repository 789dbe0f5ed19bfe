"""Takes out of a request's body what changes nothing, and keeps what was ignored of it.

The list is in `api.generation.unused_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.errors import unknown_parameter, unsupported
from api.generation.unused_parameters import LIST, UNUSED_MEMBERS, UnusedMember

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


# Members without a field: they change nothing (`api.generation.unused_parameters`), or are refused.

_CACHE = "the prefix cache finds every repeated prefix by itself"
# member -> why every value of it is refused that does not change nothing
_BOTH: Mapping[str, str] = {
    "user": "must be a string",
    "safety_identifier": "must be a string",
    "prompt_cache_key": "must be a string; the prefix cache needs no key",
    "prompt_cache_retention": _CACHE,
    "prompt_cache_options": _CACHE,
    "metadata": "must be an object of strings",
    "store": "must be a boolean",
}
_CHAT: Mapping[str, str] = {
    **_BOTH,
    "functions": "it is deprecated, use 'tools'",
    "function_call": "it is deprecated, use 'tool_choice'",
    "modalities": "answers are text",
    "audio": "answers are text",
    "prediction": "predicted outputs are not served",
    "verbosity": "must be 'low', 'medium' or 'high'",
    "web_search_options": "there is no web search",
}
_COMPLETION: Mapping[str, str] = {
    **_BOTH,
    "suffix": "text cannot be inserted before a suffix",
}
_RESPONSE: Mapping[str, str] = {
    "truncation": "must be 'auto' or 'disabled'; nothing is left out of a conversation",
    "prompt_cache_retention": _CACHE,
    "prompt_cache_options": _CACHE,
    "max_tool_calls": "must be a number from 1",
    "prompt": "there are no stored prompts",
    "conversation": "there are no conversation objects; use 'previous_response_id'",
    "context_management": "nothing is left out of a conversation",
    "moderation": "nothing is moderated",
}
_MESSAGE: Mapping[str, str] = {
    "context_management": "nothing is left out of a conversation, but what its template hides",
    "mcp_servers": "no tool runs at this server",
}
_REFUSED = {"chat": _CHAT, "completion": _COMPLETION, "response": _RESPONSE, "message": _MESSAGE}


def members_without_field(kind: str) -> Mapping[str, str]:
    """Names of members that some values of are accepted, or that are refused for a reason."""
    return {**dict.fromkeys(rows_of(kind), _OTHERWISE), **_REFUSED.get(kind, {})}


_OTHERWISE = "only values that change nothing are accepted"


def without_unused(
    body: Mapping[str, Any], kind: str, known: frozenset[str], ignored: IgnoredMembers
) -> dict[str, Any]:
    """`body` without nulls and without what changes nothing.

    Raises InvalidParameter (code unsupported_parameter) for every other member that is not in
    `known`, and for what would be ignored where that is refused.
    """
    rows = rows_of(kind)
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in rows:
            value = ignored.rest(rows[name], name, value)
            if value is None:
                continue
        if name not in known:
            why = members_without_field(kind).get(name)
            raise unknown_parameter(name) if why is None else unsupported(name, why)
        kept[name] = value
    return kept

"""Takes out of a request's body what changes nothing, and keeps what was ignored of it.

A row of UNUSED_MEMBERS has the values of a parameter that cannot affect the output, and why. A
value that is the default (`truncation: "disabled"`) needs no report. Any other is ignored and
reported in a response header: clients send it without their users' knowledge. All values that are
not in the list are refused. docs/API.md has the same table, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.errors import unknown_parameter, unsupported

MAX_USER_ID_CHARS = 512
LIST = "[]"  # at the end of a path: each entry of the list

CHAT, COMPLETION, RESPONSE, MESSAGE = "chat", "completion", "response", "message"
_CHATS = (CHAT, RESPONSE)
_OPENAI = (CHAT, COMPLETION, RESPONSE)
_TEXTS = (CHAT, COMPLETION)


@dataclass(frozen=True, slots=True)
class Values:
    """Some values of a member; `text` is how the documentation writes them."""

    text: str
    have: Callable[[object], bool]


def _one_of(*values: object) -> Values:
    def have(value: object) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    return Values(", ".join(_written(value) for value in values), have)


def _written(value: object) -> str:
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"


def _is_labels(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(label, str) for label in value.values())


def _is_user(value: object) -> bool:
    if not isinstance(value, dict) or set(value) != {"user_id"}:
        return False
    return isinstance(value["user_id"], str) and len(value["user_id"]) <= MAX_USER_ID_CHARS


def _is_cache_options(value: object) -> bool:
    return isinstance(value, dict) and set(value) <= {"mode", "ttl"}


def _keeps_all(value: object) -> bool:
    """Returns whether there is one edit, which clears no thinking."""
    return any(
        value == {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
        for keep in ("all", {"type": "all"})
    )


_LABEL = Values("a string", lambda value: isinstance(value, str))
_LABELS = Values("an object of strings", _is_labels)
_COUNT = Values(
    "a number", lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0
)
_EMPTY = Values("`[]`", lambda value: value == [])
_LEVELS = _one_of("low", "medium", "high")
_SUMMARIES = _one_of("auto", "concise", "detailed")


class UnusedMember(NamedTuple):
    """Values without effect. `path` is the name in errors, with `LIST` for any entry of a list."""

    path: str
    dialects: tuple[str, ...]
    values: Values
    why: str
    is_reported: bool = True  # reported as ignored; False for defaults


_SAME = "the default"

UNUSED_MEMBERS = (
    UnusedMember("user", _TEXTS, _LABEL, "a label"),
    UnusedMember("safety_identifier", _TEXTS, _LABEL, "a label"),
    UnusedMember("prompt_cache_key", _TEXTS, _LABEL, "the prefix cache needs no key"),
    UnusedMember("metadata", _TEXTS, _LABELS, "labels"),
    UnusedMember("client_metadata", (RESPONSE,), _LABELS, "labels"),
    UnusedMember("metadata", (MESSAGE,), Values("`{user_id}`", _is_user), "a label"),
    UnusedMember("user_profile_id", (MESSAGE,), _LABEL, "a label"),
    UnusedMember("workspace_id", (MESSAGE,), _LABEL, "a label"),
    UnusedMember("store", _TEXTS, _one_of(True), "a response is stored with its job only"),
    UnusedMember("store", _TEXTS, _one_of(False), _SAME, False),
    UnusedMember(
        "prompt_cache_retention",
        _OPENAI,
        _one_of("in_memory", "in-memory", "24h"),
        "the prefix cache keeps what fits",
    ),
    UnusedMember(
        "prompt_cache_options",
        _OPENAI,
        Values("an object of `mode`, `ttl`", _is_cache_options),
        "every repeated prefix is found",
    ),
    UnusedMember("verbosity", (CHAT,), _LEVELS, "not used"),
    UnusedMember("text.verbosity", (RESPONSE,), _LEVELS, "not used"),
    UnusedMember(
        "reasoning.summary", (RESPONSE,), _SUMMARIES, "the response has the reasoning itself"
    ),
    UnusedMember(
        "reasoning.generate_summary",
        (RESPONSE,),
        _SUMMARIES,
        "the response has the reasoning itself",
    ),
    UnusedMember("reasoning.context", (RESPONSE,), _one_of("auto"), _SAME, False),
    UnusedMember("reasoning.mode", (RESPONSE,), _one_of("standard"), _SAME, False),
    UnusedMember(
        f"include{LIST}",
        (RESPONSE,),
        _one_of("reasoning.encrypted_content"),
        "reasoning is sent as text and can be sent back unchanged",
    ),
    UnusedMember(
        f"include{LIST}",
        (RESPONSE,),
        _one_of(
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "message.input_image.image_url",
        ),
        "no output has such items",
    ),
    UnusedMember(
        "truncation",
        (RESPONSE,),
        _one_of("auto"),
        "no prompt is truncated; one that does not fit is `context_length_exceeded`",
    ),
    UnusedMember("truncation", (RESPONSE,), _one_of("disabled"), _SAME, False),
    UnusedMember("max_tool_calls", (RESPONSE,), _COUNT, "it limits built-in tools: there are none"),
    UnusedMember("context_management", (RESPONSE,), _EMPTY, _SAME, False),
    UnusedMember(
        "stream_options.include_obfuscation", _OPENAI, _one_of(True), "no padding is sent"
    ),
    UnusedMember("stream_options.continuous_usage_stats", _TEXTS, _one_of(False), _SAME, False),
    UnusedMember(
        "context_management",
        (MESSAGE,),
        Values("`clear_thinking_20251015` with `keep: all`", _keeps_all),
        "no messages are removed; the template decides what it renders",
    ),
    UnusedMember(
        "context_management",
        (MESSAGE,),
        Values("`{}`, `{edits: []}`", lambda value: value in ({}, {"edits": []})),
        _SAME,
        False,
    ),
    UnusedMember("mcp_servers", (MESSAGE,), _EMPTY, _SAME, False),
    UnusedMember("betas", (MESSAGE,), _EMPTY, _SAME, False),
    UnusedMember("fallbacks", (MESSAGE,), _EMPTY, _SAME, False),
    UnusedMember("functions", (CHAT,), _EMPTY, _SAME, False),
    UnusedMember("function_call", (CHAT,), _one_of("none", "auto"), _SAME, False),
    UnusedMember(
        "modalities", (CHAT,), Values('`["text"]`', lambda value: value == ["text"]), _SAME, False
    ),
    UnusedMember("suffix", (COMPLETION,), _one_of(""), _SAME, False),
    UnusedMember("skip_special_tokens", _OPENAI, _one_of(True), _SAME, False),
    UnusedMember("spaces_between_special_tokens", _OPENAI, _one_of(True), _SAME, False),
    UnusedMember("include_stop_str_in_output", _OPENAI, _one_of(False), _SAME, False),
    UnusedMember("return_tokens_as_token_ids", _TEXTS, _one_of(False), _SAME, False),
    UnusedMember("use_beam_search", _TEXTS, _one_of(False), _SAME, False),
    UnusedMember("length_penalty", _TEXTS, _one_of(1.0, 1), _SAME, False),
    UnusedMember("bad_words", _TEXTS, _EMPTY, _SAME, False),
    UnusedMember("add_generation_prompt", _CHATS, _one_of(True), _SAME, False),
    UnusedMember("continue_final_message", _CHATS, _one_of(False), _SAME, False),
    UnusedMember("include_reasoning", _CHATS, _one_of(True), _SAME, False),
    UnusedMember("add_special_tokens", (CHAT,), _one_of(False), _SAME, False),
    UnusedMember("add_special_tokens", (COMPLETION,), _one_of(True), _SAME, False),
    UnusedMember("documents", (CHAT,), _EMPTY, _SAME, False),
)


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
    """Returns the rows of a dialect by the top-level member that they are about."""
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
        """Returns the value of the header `x-penstock-ignored`; None: nothing was ignored."""
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

    def leave_out(self, names: Iterable[str]) -> None:
        """Adds what the model does not see: few different names, of the code's own choice. Raises
        InvalidParameter where nothing may be ignored."""
        for name in names:
            if self._refuse:
                raise unsupported(name, "it is not served, and would be left out")
            if name not in self.names:
                self.names.append(name)

    def _rest_of_list(self, row: UnusedMember, name: str, value: list[Any]) -> list[Any]:
        kept = []
        for index, entry in enumerate(value):
            if row.values.have(entry):
                self._take(row, f"{name}.{index}")
            else:
                kept.append(entry)
        return kept

    def _take(self, row: UnusedMember, at: str) -> None:
        if not row.is_reported:
            return
        if self._refuse:
            raise unsupported(at, f"it changes nothing here ({row.why})")
        name = row.path.removesuffix(LIST)
        if name not in self.names:
            self.names.append(name)


# Members without a field: they change nothing (UNUSED_MEMBERS), or are refused.

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
    """Returns `body` without nulls and without what changes nothing.

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

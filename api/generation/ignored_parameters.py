"""The rule of ignored parameters: a parameter takes effect, is ignored and reported, or is a 400.

A row of UNUSED_MEMBERS has the values of a parameter that cannot affect the output, and why. A
value that is the default (`truncation: "disabled"`) needs no report. Any other is ignored and
reported in a response header: clients send it without their users' knowledge. All values that are
not in the list are refused: `refused_parameters.py` has the reasons. `make docs` writes the table
into docs/API.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from api.generation.schemas import whole_number
from api.on_demand import load_part
from api.request_errors import unsupported
from shared.messages import InvalidParameter

LIST = "[]"  # at the end of a path: each entry of the list

CHAT, COMPLETION, RESPONSE, MESSAGE = "chat", "completion", "response", "message"
EMBEDDING = "embedding"
_CHATS = (CHAT, RESPONSE)
_OPENAI = (CHAT, COMPLETION, RESPONSE)
_TEXTS = (CHAT, COMPLETION)


@dataclass(frozen=True, slots=True)
class Values:
    """Some values of a member; `text` is how the documentation writes them, `schema` how the
    OpenAPI document does."""

    text: str
    have: Callable[[object], bool]
    schema: Mapping[str, Any] = field(default_factory=dict)


def _one_of(*values: object) -> Values:
    def have(value: object) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    text = ", ".join(_written(value) for value in values)
    return Values(text, have, {"enum": list(values)})


def _written(value: object) -> str:
    return f"`{value}`" if not isinstance(value, bool) else f"`{str(value).lower()}`"


def _is_labels(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(label, str | None) for label in value.values()
    )


def _is_cache_options(value: object) -> bool:
    return isinstance(value, dict) and set(value) <= {"mode", "ttl"}


def _is_edits(value: object) -> bool:
    if not isinstance(value, dict) or set(value) != {"edits"}:
        return False
    edits = value["edits"]
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and isinstance(edit.get("type"), str) for edit in edits
    )


def _is_count(value: object) -> bool:
    count = whole_number(value)
    return isinstance(count, int) and not isinstance(count, bool) and count > 0


_LABEL = Values("a string", lambda value: isinstance(value, str), {"type": "string"})
_LABELS = Values(
    "an object of strings",
    _is_labels,
    {"type": "object", "additionalProperties": {"type": "string"}},
)
_COUNT = Values("a number", _is_count, {"type": "integer", "minimum": 1})
_EMPTY = Values("`[]`", lambda value: value == [], {"type": "array", "maxItems": 0})
_OBJECT = Values("an object", lambda value: isinstance(value, dict), {"type": "object"})
_LIST = Values("a list", lambda value: isinstance(value, list), {"type": "array"})
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
    UnusedMember("user", (*_TEXTS, EMBEDDING), _LABEL, "a label"),
    UnusedMember("safety_identifier", _TEXTS, _LABEL, "a label"),
    UnusedMember("prompt_cache_key", _TEXTS, _LABEL, "the prefix cache needs no key"),
    UnusedMember("metadata", _TEXTS, _LABELS, "labels"),
    UnusedMember("client_metadata", (RESPONSE,), _LABELS, "labels"),
    UnusedMember("metadata", (MESSAGE,), _LABELS, "labels"),
    UnusedMember("user_profile_id", (MESSAGE,), _LABEL, "a label"),
    UnusedMember("workspace_id", (MESSAGE,), _LABEL, "a label"),
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
    UnusedMember(
        "max_tool_calls", (RESPONSE,), _COUNT, "it limits built-in tools, which do not exist here"
    ),
    UnusedMember("context_management", (RESPONSE,), _EMPTY, _SAME, False),
    UnusedMember(
        "stream_options.include_obfuscation", _OPENAI, _one_of(True), "no padding is sent"
    ),
    UnusedMember(
        "context_management",
        (MESSAGE,),
        Values("`{}`, `{edits: []}`", lambda value: value in ({}, {"edits": []})),
        _SAME,
        False,
    ),
    UnusedMember(
        "context_management",
        (MESSAGE,),
        Values("`{edits}`", _is_edits),
        "no messages are removed; the template decides what it renders",
    ),
    UnusedMember("thinking.display", (MESSAGE,), _one_of("summarized"), _SAME, False),
    UnusedMember(
        "thinking.display", (MESSAGE,), _one_of("omitted", "updates"), "all reasoning is sent"
    ),
    UnusedMember("thinking.block_binding", (MESSAGE,), _OBJECT, "thinking has no signature"),
    UnusedMember("output_config.task_budget", (MESSAGE,), _OBJECT, "the model knows no budget"),
    UnusedMember("speed", (MESSAGE,), _one_of("standard"), _SAME, False),
    UnusedMember("speed", (MESSAGE,), _one_of("fast"), "there is one speed"),
    UnusedMember("mcp_servers", (MESSAGE,), _EMPTY, _SAME, False),
    UnusedMember("mcp_servers", (MESSAGE,), _LIST, "no tool runs at this server"),
    UnusedMember("container", (MESSAGE,), _LABEL, "no tool runs at this server"),
    UnusedMember("container", (MESSAGE,), _OBJECT, "no tool runs at this server"),
    UnusedMember("betas", (MESSAGE,), _EMPTY, _SAME, False),
    UnusedMember("betas", (MESSAGE,), _LIST, "no feature served here needs a header"),
    UnusedMember("fallbacks", (MESSAGE,), _EMPTY, _SAME, False),
    UnusedMember("fallbacks", (MESSAGE,), _LIST, "no request is declined"),
    UnusedMember("fallbacks", (MESSAGE,), _one_of("default"), "no request is declined"),
    UnusedMember("fallback_credit_token", (MESSAGE,), _LABEL, "nothing is billed"),
    UnusedMember("fallback_credit_token", (MESSAGE,), _OBJECT, "nothing is billed"),
    UnusedMember("billing_policy", (MESSAGE,), _OBJECT, "nothing is billed"),
    UnusedMember("inference_geo", (MESSAGE,), _LABEL, "there is one place"),
    UnusedMember("diagnostics", (MESSAGE,), _OBJECT, "usage has the tokens that were cached"),
    UnusedMember("context_hint", (MESSAGE,), _OBJECT, "no messages are removed"),
    UnusedMember("safeguards", (MESSAGE,), _LIST, "nothing is moderated"),
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
        """Returns the rest of the value of member `name`; None where nothing is left. The value
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
        """Adds names of parts that the model does not see. Raises InvalidParameter where nothing
        may be ignored."""
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
        self._name(row.path.removesuffix(LIST))

    def report(self, name: str, refusal: InvalidParameter) -> None:
        """Names a parameter that the model ignores. Raises `refusal` where nothing may be."""
        if self._refuse:
            raise refusal
        self._name(name)

    def _name(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)


# The ignored members of the current request: set before its body is parsed.
request_ignored: ContextVar[IgnoredMembers] = ContextVar("request_ignored")


def report_ignored(
    names: Iterable[str],
    renamed: Mapping[str, str] | None = None,
    why: str = "this model does not use it, does not support this value or cannot be kept to it",
) -> None:
    """Names parameters that do not affect this model's answer. `renamed`: chat's names -> those of
    the dialect. Raises InvalidParameter, with `why` in it, if such a request is refused."""
    for name in names:
        shown = (renamed or {}).get(name, name)
        refusal = unsupported(shown, why)
        request_ignored.get().report(shown, refusal)


def without_unused(
    body: Mapping[str, Any], kind: str, known: frozenset[str], ignored: IgnoredMembers
) -> dict[str, Any]:
    """Returns `body` without nulls and without values that change nothing.

    Raises InvalidParameter (code unsupported_parameter) for every other member that is not in
    `known`, and for ignored values where these are refused.
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
            raise load_part("refused_parameters").refusal(name, kind)
        kept[name] = value
    return kept

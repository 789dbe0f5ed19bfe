"""Members with no field of their own: accepted because they ask for nothing, or refused by name.

This is the one place where a member may be accepted without effect. The rule: its value asks for
what happens anyway (`store: false`), or it is a label that has no effect on the answer at OpenAI
either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from api.errors import MAX_ECHO_CHARS, unsupported


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


def _is_label(value: object) -> bool:
    return isinstance(value, str)


def _are_labels(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(label, str) for label in value.values())


# member -> (accepts this value without effect, why any other value is refused)
_BOTH: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "user": (_is_label, "must be a string"),
    "safety_identifier": (_is_label, "must be a string"),
    "prompt_cache_key": (_is_label, "must be a string; the prefix cache needs no key"),
    "metadata": (_are_labels, "must be an object of strings"),
    "store": (_is(False), "answers are not stored beyond the job's own record"),
}
_CHAT: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **_BOTH,
    "functions": (_is([]), "it is deprecated, use 'tools'"),
    "function_call": (_is("none", "auto"), "it is deprecated, use 'tool_choice'"),
    "modalities": (_is(["text"]), "answers are text"),
    "audio": (_is(), "answers are text"),
    "prediction": (_is(), "predicted outputs are not served"),
    "verbosity": (_is(), "the verbosity cannot be set"),
    "web_search_options": (_is(), "there is no web search"),
}
_COMPLETION: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **_BOTH,
    "suffix": (_is(""), "text cannot be inserted before a suffix"),
}
_RESPONSE: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "truncation": (_is("disabled"), "nothing is left out of a conversation"),
    "prompt_cache_retention": (_is("in_memory"), "the prefix cache is in memory"),
    "max_tool_calls": (_is(), "it limits built-in tools, and there are none"),
    "prompt": (_is(), "there are no stored prompts"),
    "conversation": (_is(), "there are no conversation objects; use 'previous_response_id'"),
    "context_management": (_is(), "nothing is left out of a conversation"),
    "moderation": (_is(), "nothing is moderated"),
}
MEMBERS_WITHOUT_EFFECT = {"chat": _CHAT, "completion": _COMPLETION, "response": _RESPONSE}


def without_inert(body: Mapping[str, Any], kind: str, known: frozenset[str]) -> dict[str, Any]:
    """`body` without nulls and without members that ask for nothing.

    Raises InvalidParameter (code unsupported_parameter) for every other member that is not in
    `known`.
    """
    inert = MEMBERS_WITHOUT_EFFECT.get(kind, {})
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
            continue
        accepts, why = inert.get(name, (_is(), "it is not known here"))
        if not accepts(value):
            raise unsupported(name[:MAX_ECHO_CHARS], why)
    return kept

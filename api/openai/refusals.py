"""Members without a field: they change nothing (`api.unused_members`), or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.errors import MAX_ECHO_CHARS, unsupported
from api.ignored_members import IgnoredMembers, rows_of

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
            why = members_without_field(kind).get(name, "it is not known here")
            raise unsupported(name[:MAX_ECHO_CHARS], why)
        kept[name] = value
    return kept

"""Why a parameter without a field is refused: for a value that changes something, or for any."""

from __future__ import annotations

from collections.abc import Mapping

from api.generation.ignored_parameters import rows_of
from api.request_errors import unknown_parameter, unsupported
from shared.messages import InvalidParameter

_OTHERWISE = "only values that change nothing are accepted"
_CACHE = "the prefix cache finds every repeated prefix by itself"
# member -> why every value of it is refused that does not change nothing
_BOTH: Mapping[str, str] = {
    "user": "must be a string",
    "safety_identifier": "must be a string",
    "prompt_cache_key": "must be a string; the prefix cache needs no key",
    "prompt_cache_retention": _CACHE,
    "prompt_cache_options": _CACHE,
    "metadata": "must be an object of strings",
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
    "metadata": "must be an object of strings",
    "compaction": "no conversation is summarized here",
    "context_management": "must be an object of 'edits'",
    "speed": "must be 'standard' or 'fast'",
}
_REFUSED = {"chat": _CHAT, "completion": _COMPLETION, "response": _RESPONSE, "message": _MESSAGE}


def members_without_field(kind: str) -> Mapping[str, str]:
    """Names of members that some values of are accepted, or that are refused for a reason."""
    return {**dict.fromkeys(rows_of(kind), _OTHERWISE), **_REFUSED.get(kind, {})}


def refusal(name: str, kind: str) -> InvalidParameter:
    """Returns the error of a member that the requests of a dialect have no field for."""
    why = members_without_field(kind).get(name)
    return unknown_parameter(name) if why is None else unsupported(name, why)

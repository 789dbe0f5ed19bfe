"""Structured output: what a request says its answer must match, as one grammar.

`response_format` is OpenAI's member; `guided_json`, `guided_regex`, `guided_choice`,
`guided_grammar` and `structured_outputs` are those of vLLM's clients. A request has one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from api.errors import MAX_ECHO_CHARS, unknown_parameter
from api.generation.models import ServedModel
from api.generation.protocol import CompletionFields
from shared.messages import Grammar, InvalidParameter
from shared.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

NOT_SERVED = "structured_output_not_supported"

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SCHEMA_PATH = "response_format.json_schema"


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """`param`: the member that asks for it, for errors."""

    grammar: Grammar
    param: str


def structured_members(request: CompletionFields) -> dict[str, Any]:
    """Those of a request's members that grammar_of reads."""
    found = {name: getattr(request, name) for name in _READERS}
    return {name: value for name, value in found.items() if value is not None}


def grammar_of(members: Mapping[str, Any]) -> RequestedGrammar | None:
    """What the answer must match; None for any text. Raises InvalidParameter.

    Large schemas take their time: call it on a thread of the TextPool.
    """
    requested: RequestedGrammar | None = None
    for name, value in members.items():
        found = _READERS[name](value, name)
        if found is not None and requested is not None:
            first = requested.param.partition(".")[0]
            raise InvalidParameter(name, f"cannot be combined with '{first}'")
        requested = found or requested
    return requested


def check_grammar(model: ServedModel, requested: RequestedGrammar) -> None:
    """Whether the model can follow it: compiles it. Raises InvalidParameter.

    Takes its time: call it on a thread of the TextPool.
    """
    if not model.card.structured_output:
        raise InvalidParameter(
            requested.param, "this model's answers cannot be kept to a structure", NOT_SERVED
        )
    model.text.grammars.check(requested.grammar, requested.param)


def checked_grammar(model: ServedModel, members: Mapping[str, Any]) -> Grammar | None:
    """Both at once. Raises InvalidParameter."""
    requested = grammar_of(members)
    if requested is None:
        return None
    check_grammar(model, requested)
    return requested.grammar


def _response_format(value: Any, param: str) -> RequestedGrammar | None:
    checked = _object(value, param)
    kind = checked.get("type")
    if kind == "json_schema":
        _only(checked, param, "type", "json_schema")
        return _named_schema(checked.get("json_schema"))
    _only(checked, param, "type")
    if kind == "json_object":
        return RequestedGrammar(json_object_grammar(), param)
    if kind != "text":
        raise InvalidParameter(f"{param}.type", "must be 'text', 'json_object' or 'json_schema'")
    return None


def _named_schema(value: Any) -> RequestedGrammar:
    """A schema is enforced whether it is strict or not."""
    named = _object(value, _SCHEMA_PATH)
    _only(named, _SCHEMA_PATH, "name", "description", "schema", "strict")
    name = named.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidParameter(
            f"{_SCHEMA_PATH}.name", "must have 1 to 64 letters, digits, underscores and dashes"
        )
    for member, kind, words in (("description", str, "a string"), ("strict", bool, "a boolean")):
        if not isinstance(named.get(member), kind | None):
            raise InvalidParameter(f"{_SCHEMA_PATH}.{member}", f"must be {words}")
    schema = named.get("schema")
    path = f"{_SCHEMA_PATH}.schema"
    return RequestedGrammar(json_schema_grammar({} if schema is None else schema, path), path)


def _guided_json(value: Any, param: str) -> RequestedGrammar:
    """A schema, or one as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(param, f"is not JSON: {str(error)[:MAX_ECHO_CHARS]}") from None
    return RequestedGrammar(json_schema_grammar(value, param), param)


def _guided_regex(value: Any, param: str) -> RequestedGrammar:
    return RequestedGrammar(regex_grammar(_text(value, param), param), param)


def _guided_choice(value: Any, param: str) -> RequestedGrammar:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidParameter(param, "must be a list of strings")
    return RequestedGrammar(choice_grammar(value, param), param)


def _guided_grammar(value: Any, param: str) -> RequestedGrammar:
    return RequestedGrammar(lark_grammar(_text(value, param), param), param)


def _json_object(value: Any, param: str) -> RequestedGrammar | None:
    if not isinstance(value, bool):
        raise InvalidParameter(param, "must be a boolean")
    return RequestedGrammar(json_object_grammar(), param) if value else None


def _structured_outputs(value: Any, param: str) -> RequestedGrammar | None:
    checked = {name: each for name, each in _object(value, param).items() if each is not None}
    _only(checked, param, *_KINDS)
    found = {name: _KINDS[name](each, f"{param}.{name}") for name, each in checked.items()}
    requested = [each for each in found.values() if each is not None]
    if len(requested) != 1:
        raise InvalidParameter(param, f"must have one of {', '.join(_KINDS)}")
    return requested[0]


_Reader = Callable[[Any, str], RequestedGrammar | None]
_KINDS: Mapping[str, _Reader] = {
    "json": _guided_json,
    "regex": _guided_regex,
    "choice": _guided_choice,
    "grammar": _guided_grammar,
    "json_object": _json_object,
}
_READERS: Mapping[str, _Reader] = {
    "response_format": _response_format,
    "guided_json": _guided_json,
    "guided_regex": _guided_regex,
    "guided_choice": _guided_choice,
    "guided_grammar": _guided_grammar,
    "structured_outputs": _structured_outputs,
}


def _object(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidParameter(param, "must be an object")
    return value


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(param, "must be a string")
    return value


def _only(value: Mapping[str, Any], param: str, *names: str) -> None:
    for name in value:
        if name not in names:
            raise unknown_parameter(f"{param}.{name}")

"""Structured output: what a request's output must match, as one grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from api.errors import MAX_ECHO_CHARS
from api.generation.models import ServedModel
from api.generation.protocol import CompletionFields, ResponseFormat, StructuredOutputs
from shared.messages import Grammar, InvalidParameter
from shared.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

NOT_SERVED = "structured_output_not_supported"


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the parameter that requests it, for errors."""

    grammar: Grammar
    param: str


def requested_grammar(request: CompletionFields) -> RequestedGrammar | None:
    """Returns what the output must match, or None for any text.

    CPU-bound for large schemas: run it in the thread pool. Raises InvalidParameter, also where the
    request has several.
    """
    requested: RequestedGrammar | None = None
    for found in _requested_grammars(request):
        if requested is not None:
            name, first = (one.param.partition(".")[0] for one in (found, requested))
            raise InvalidParameter(name, f"cannot be combined with '{first}'")
        requested = found
    return requested


def check_grammar(model: ServedModel, requested: RequestedGrammar) -> None:
    """Compiles a grammar for the model. CPU-bound: run it in the thread pool.

    Raises InvalidParameter where the model's output cannot be kept to it.
    """
    if not model.card.structured_output:
        raise InvalidParameter(
            requested.param, "this model's answers cannot be kept to a structure", NOT_SERVED
        )
    model.text.grammars.check(requested.grammar, requested.param)


def checked_grammar(model: ServedModel, request: CompletionFields) -> Grammar | None:
    """Returns the grammar of a request, compiled. Raises InvalidParameter."""
    requested = requested_grammar(request)
    if requested is None:
        return None
    check_grammar(model, requested)
    return requested.grammar


def object_output(param: str) -> RequestedGrammar:
    """Returns the grammar of any JSON object."""
    return RequestedGrammar(json_object_grammar(), param)


def schema_output(schema: dict[str, Any] | bool | None, param: str) -> RequestedGrammar:
    """Returns the grammar of a JSON schema, strict or not. Raises InvalidParameter."""
    return RequestedGrammar(json_schema_grammar({} if schema is None else schema, param), param)


def _requested_grammars(request: CompletionFields) -> Iterator[RequestedGrammar]:
    found = _of_format(request.response_format)
    if found is not None:
        yield found
    for name, make in _MAKERS.items():
        param = f"guided_{name}"
        value = getattr(request, param)
        if value is not None:
            yield RequestedGrammar(make(value, param), param)
    if request.structured_outputs is not None:
        yield _of_structured(request.structured_outputs)


def _of_format(response_format: ResponseFormat | None) -> RequestedGrammar | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return object_output("response_format")
    schema = response_format.json_schema.json_schema
    return schema_output(schema, "response_format.json_schema.schema")


def _of_structured(structured: StructuredOutputs) -> RequestedGrammar:
    param = "structured_outputs"
    values = structured.model_dump(by_alias=True, exclude_none=True)
    is_object = values.pop("json_object", False)
    if len(values) + is_object != 1:
        names = ", ".join([*_MAKERS, "json_object"])
        raise InvalidParameter(param, f"must have one of {names}")
    if is_object:
        return object_output(f"{param}.json_object")
    ((name, value),) = values.items()
    return RequestedGrammar(_MAKERS[name](value, f"{param}.{name}"), f"{param}.{name}")


def _guided_json(value: dict[str, Any] | str | bool, param: str) -> Grammar:
    """Returns the grammar of a schema, or of one as JSON text."""
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(param, f"is not JSON: {str(error)[:MAX_ECHO_CHARS]}") from None
    return json_schema_grammar(schema, param)


_MAKERS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _guided_json,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}

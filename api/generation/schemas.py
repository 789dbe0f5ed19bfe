"""Changes of pydantic's schemas for requests: whole numbers, and bounds for the document."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core.core_schema import no_info_before_validator_function

from shared.messages import (
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    MIN_SEED,
)


def described(**schema: Any) -> Any:
    """Returns bounds for the OpenAPI document alone: SamplingParams checks them."""
    return Field(json_schema_extra=schema)


MAX_LABELS, MAX_LABEL_KEY_CHARS, MAX_LABEL_CHARS = 16, 64, 512  # of `metadata`
LABELS: dict[str, Any] = {
    "maxProperties": MAX_LABELS,
    "propertyNames": {"maxLength": MAX_LABEL_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MAX_LABEL_CHARS},
}
Share = Annotated[float, described(minimum=0, maximum=1)]
Penalty = Annotated[float, described(minimum=-2, maximum=2)]
Temperature = Annotated[float, described(minimum=0, maximum=2)]
RepetitionPenalty = Annotated[float, described(minimum=0.01, maximum=100)]
TopK = Annotated[int, described(minimum=-1, maximum=2**31 - 1)]
Seed = Annotated[int, described(minimum=MIN_SEED, maximum=MAX_SEED)]
Count = Annotated[int, described(minimum=0)]
MaxTokens = Annotated[int, described(minimum=1)]
BIAS = {"type": "number", "minimum": -100, "maximum": 100}
TopLogprobs = Annotated[int, described(minimum=0, maximum=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, described(minLength=1, maxLength=MAX_STOP_STRING_CHARS)]
StopStrings = Annotated[
    list[StopString], Field(fail_fast=True), described(maxItems=MAX_STOP_STRINGS)
]


def accept_whole_numbers(schema: Any) -> None:
    """Changes the schema of a model in place: its own fields of integers.

    WHOLE_NUMBERS is for integers in lists, WholeNumber for those of typed dictionaries.
    """
    inner = schema.get("schema")
    if isinstance(inner, dict):
        schema["schema"] = _with_whole_numbers(inner)
    for field in schema.get("fields", {}).values():
        accept_whole_numbers(field)
    if schema["type"] == "union":
        schema["choices"] = [
            choice if isinstance(choice, tuple) else _with_whole_numbers(choice)
            for choice in schema["choices"]
        ]


def _with_whole_numbers(schema: Any) -> Any:
    if schema["type"] == "int":
        return no_info_before_validator_function(whole_number, schema)
    if schema["type"] != "list" and schema.get("function") != _WHOLE_NUMBER:
        accept_whole_numbers(schema)
    return schema


def whole_number(value: Any) -> Any:
    """Returns a value, as an integer where it is written as `8.0`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_numbers(value: Any) -> Any:
    # At once for a list of integers: it may have a hundred thousand.
    if isinstance(value, list) and float in map(type, value):
        return list(map(whole_number, value))
    return value


WHOLE_NUMBERS = BeforeValidator(_whole_numbers)
WholeNumber = Annotated[int, BeforeValidator(whole_number)]  # outside of request models
_WHOLE_NUMBER = {"type": "no-info", "function": whole_number}

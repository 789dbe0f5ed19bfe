"""What the arguments of an enforced call may be: those that the function's parameters name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.openai.tools import NO_PARAMETERS

# With one of these an object may have properties that are not in its `properties`.
_NAMING_OTHERS = (
    *("additionalProperties", "patternProperties", "minProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
)


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema that the arguments of a call are kept to."""
    schema = {"type": "object", **parameters}
    if parameters is NO_PARAMETERS or _names_all(schema):
        schema["additionalProperties"] = False
    return schema


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema names some properties and says nothing of others. JSON schema would
    let others pass, but a function takes none: a call with one fails."""
    named = schema.get("properties")
    required = schema.get("required", [])
    return (
        isinstance(named, Mapping)
        and bool(named)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
        and not any(keyword in schema for keyword in _NAMING_OTHERS)
    )

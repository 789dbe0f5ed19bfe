"""JSON schemas of requests for the OpenAPI document: what parsing accepts beside the fields."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import JsonSchemaValue

from api.generation.ignored_parameters import rows_of
from api.generation.refused_parameters import members_without_field

_NULL = {"type": "null"}


def complete(schema: JsonSchemaValue, kind: str) -> None:
    """Adds null for every optional parameter, and the parameters without a field, in place."""
    required = schema.get("required", ())
    properties = schema.setdefault("properties", {})
    for name, parameter in properties.items():
        if name not in required:
            properties[name] = or_null(parameter)
    for name, why in members_without_field(kind).items():
        described = f"Accepted where it changes nothing; else refused: {why}."
        accepted = schema_without_field(kind, name)
        properties.setdefault(
            name, {"description": described, "x-without-effect": True, **accepted}
        )


def or_null(parameter: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the JSON schema of an optional parameter: null counts as absent."""
    if _NULL in parameter.get("anyOf", ()):
        return parameter
    outer: JsonSchemaValue = {
        name: parameter[name] for name in ("default", "title") if name in parameter
    }
    inner = {name: value for name, value in parameter.items() if name not in outer}
    return {"anyOf": [inner, _NULL], **outer}


def schema_without_field(kind: str, name: str) -> dict[str, Any]:
    """Returns the JSON schema of the accepted values of such a member, among them null."""
    rows = [row for row in rows_of(kind).get(name, ()) if row.path == name]
    return {"anyOf": [*(dict(row.values.schema) for row in rows), {"type": "null"}]}

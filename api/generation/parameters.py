"""The parameters of a tool: in one schema, or one by one where a format writes each argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.generation.tools import NO_PARAMETERS, Tool
from api.output_parsers.parser import Types
from shared.messages import InvalidParameter

MAX_REFERENCES = 8  # from one schema to the next
_KINDS = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
# Keywords beside the properties of a schema of arguments that can be enforced.
_KNOWN = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
    | {"title", "description", "default", "examples", "example", "$id", "$comment"}
)

# With one of these an object may have properties that are not in its `properties`.
_ADMIT_OTHERS = (
    *("additionalProperties", "patternProperties", "minProperties"),
    *("allOf", "anyOf", "oneOf", "$ref"),
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool, and its JSON schema."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters of a tool. `is_open`: it takes others, of any name."""

    named: Sequence[Parameter]
    is_open: bool


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema that the arguments of an enforced call are kept to."""
    schema = {"type": "object", **parameters}
    if parameters is NO_PARAMETERS or _names_all(schema):
        schema["additionalProperties"] = False
    return schema


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema names its properties and does not mention others.

    JSON schema admits others then, but a function does not take them: a call with one fails.
    """
    properties = schema.get("properties")
    required = schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and bool(properties)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and not any(keyword in schema for keyword in _ADMIT_OTHERS)
    )


def parameters(tool: Tool) -> Parameters:
    """Returns the parameters, the required ones first. Raises InvalidParameter for a strict tool
    whose schema a format of single arguments cannot enforce."""
    schema = arguments_schema(tool.parameters)
    additional = schema.get("additionalProperties", True)
    if tool.strict:
        others = [keyword for keyword in schema if keyword not in _KNOWN]
        if isinstance(additional, Mapping) and additional:
            others.append("additionalProperties")
        if others:
            raise refused(tool, f"'{others[0][:80]}'")
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = [str(name) for name in required] if isinstance(required, list) else []
    names = dict.fromkeys([*(name for name in properties if name in required), *required])
    named = [Parameter(name, _schema(properties.get(name)), True) for name in names]
    named += [
        Parameter(name, _schema(inner), False)
        for name, inner in properties.items()
        if name not in names
    ]
    return Parameters(named, additional is not False)


def refused(tool: Tool, what: str) -> InvalidParameter:
    """Returns the error of a strict tool whose schema cannot be kept to."""
    return InvalidParameter(
        tool.schema_param,
        f"the schema uses {what}, which cannot be enforced in the format of this model's calls",
    )


def parameter_types(tool: Tool) -> dict[str, Types]:
    """Returns the types of each parameter of a known one."""
    root = tool.parameters
    properties = root.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    types = SchemaTypes(root)
    found = {name: types.of(_schema(inner)) for name, inner in properties.items()}
    return {name: kinds for name, kinds in found.items() if kinds}


class SchemaTypes:
    """The types of one tool's schemas. Each is read once for a depth, however many refer to it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root  # keeps the schemas, and so their identities
        self._known: dict[tuple[int, int], Types] = {}

    def of(self, schema: Mapping[str, Any], depth: int = 0) -> Types:
        """Returns JSON schema's names of the types that a value may have; () for any. `schema` is
        a part of the tool's."""
        schema = resolved(schema, self._root)
        if not schema:
            return ()
        key = (id(schema), depth)
        if key not in self._known:
            self._known[key] = self._read(schema, depth)
        return self._known[key]

    def _read(self, schema: Mapping[str, Any], depth: int) -> Types:
        kinds = schema.get("type")
        values = values_of(schema)
        found: set[str] = set()
        if isinstance(kinds, str | list):
            found = set([kinds] if isinstance(kinds, str) else map(str, kinds)) & _KINDS
        elif values is not None:
            found = {_type_of(value) for value in values}
        else:
            branches = branches_of(schema)
            if not branches or depth == MAX_REFERENCES:
                return ()
            for branch in branches:
                types = self.of(branch, depth + 1)
                if not types:
                    return ()
                found.update(types)
        if found and schema.get("nullable") is True:
            found.add("null")
        return tuple(sorted(found))


def values_of(schema: Mapping[str, Any]) -> Sequence[object] | None:
    """Returns the only values that a schema allows; None where it does not list them."""
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return values
    return [schema["const"]] if "const" in schema else None


def branches_of(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the alternatives of a schema."""
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            return [_schema(branch) for branch in branches]
    return []


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the target of a `$ref`, or the schema itself; {} for a missing target."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) and name else None
        schema = _schema(found)
    return {}


def _schema(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"

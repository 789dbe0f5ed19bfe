"""Adds to the OpenAPI document the sentences and examples of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from api.reference import examples, members, parameters, routes

GROUPS = "x-groups"  # of a body's schema: a list of {title, parameters}, in order of use
WITHOUT_EFFECT = "x-without-effect"  # true: the parameter is accepted if it changes nothing
_FORM = "Form"  # the schema of a form has no name
_MAX_WHOLE = 2**63  # where a double is no whole number of 64 bits any more

Schema = dict[str, Any]


def describe(document: Schema) -> None:
    """Describes parameters, bodies and responses of all operations in place.

    A parameter without a sentence stays as it is: tests/unit/api/test_reference.py names it.
    """
    schemas = document["components"]["schemas"]
    bodies: dict[str, Schema] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            _describe_operation(f"{method.upper()} {path}", path, operation)
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                name = _name(schema.get("$ref", _FORM))
                bodies[name] = schemas.get(name, schema)
                content["examples"] = {
                    f"example-{number}": {"summary": summary, "value": value}
                    for number, (summary, value) in enumerate(_examples(name), 1)
                }
    for name, schema in bodies.items():
        _describe_body(name, schema)
    for name in _referred(list(bodies.values()), schemas) - bodies.keys():
        for member, schema in schemas[name].get("properties", {}).items():
            own = members.OWN.get(f"{_name(name)}.{member}")
            _describe(schema, own or members.SENTENCES.get(member))
    _make_whole(schemas)


def _examples(name: str) -> Iterable[tuple[str, Any]]:
    return examples.BODIES.get(name, {}).items()


def _describe(described: Schema, sentence: str | None) -> None:
    if sentence:
        described["description"] = sentence


def _describe_operation(route: str, path: str, operation: Schema) -> None:
    for parameter in operation.get("parameters", ()):
        name = parameter["name"].lower()
        fitting = [
            key
            for key in routes.PARAMETERS
            if key.rpartition(" ")[2] == name and key.rpartition(" ")[0] in path
        ]
        if "description" not in parameter:
            _describe(parameter, routes.PARAMETERS.get(max(fitting, key=len, default=name)))
    for status, response in operation["responses"].items():
        own = routes.RESPONSES.get(f"{route} {status}")
        _describe(response, own or routes.RESPONSES.get(status))


def _describe_body(name: str, schema: Schema) -> None:
    properties: Mapping[str, Schema] = schema["properties"]
    names = (name, parameters.SAME.get(name, name))
    served = [one for one, described in properties.items() if WITHOUT_EFFECT not in described]
    for one in served:
        own = [parameters.OWN.get(f"{body}.{one}") for body in names]
        described = properties[one]
        _describe(described, next(filter(None, own), None) or parameters.SENTENCES.get(one))
        if one in examples.VALUES:
            described["examples"] = [examples.VALUES[one]]
    groups = [
        {"title": title, "parameters": [one for one in members if one in served]}
        for title, members in parameters.GROUPS.items()
    ]
    others = [one for one in properties if one not in served]
    groups.append({"title": parameters.WITHOUT_EFFECT, "parameters": others})
    grouped = {one for group in groups for one in group["parameters"]}
    groups.append({"title": "Others", "parameters": [one for one in served if one not in grouped]})
    schema[GROUPS] = [group for group in groups if group["parameters"]]


def _name(reference: str) -> str:
    """Returns the name of a schema, without the module that distinguishes two of a name."""
    return reference.rpartition("/")[2].rpartition("__")[2]


def _referred(schemas: list[Any], known: Mapping[str, Schema]) -> set[str]:
    """Returns the full names of all schemas that these ones refer to, directly or indirectly."""
    found: set[str] = set()
    while schemas:
        part = schemas.pop()
        if isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name in known and name not in found:
                found.add(name)
                schemas.append(known[name])
            schemas += part.values()
        elif isinstance(part, list):
            schemas += part
    return found


def _make_whole(part: Any) -> None:
    """Writes the bounds of integers as integers: FastAPI makes doubles of them."""
    if isinstance(part, dict):
        for bound in ("minimum", "maximum", "exclusiveMaximum"):
            value = part.get(bound)
            if isinstance(value, float) and value.is_integer():
                part[bound] = min(int(value), _MAX_WHOLE - 1)
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            _make_whole(inner)

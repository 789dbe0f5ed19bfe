"""The OpenAPI document has a sentence for everything that a request can have, in plain English."""

from __future__ import annotations

import json
import re
from typing import Any

from api.reference import members, parameters, routes
from api.reference.describe import GROUPS
from tests.support.api_document import api_document, json_routes, operations


def described_schemas() -> dict[str, dict[str, Any]]:
    """Schemas that requests have: of bodies and what is inside them, and the form of files."""
    found: dict[str, dict[str, Any]] = {}
    unread: list[Any] = [operation.get("requestBody") for _, operation in operations()]
    while unread:
        part = unread.pop()
        if isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found[name] = api_document()["components"]["schemas"][name]
                unread.append(found[name])
            if "expires_after[anchor]" in part.get("properties", {}):
                found["Form"] = part
        unread += part.values() if isinstance(part, dict) else part if type(part) is list else []
    return found


def test_everything_that_a_request_can_have_is_described() -> None:
    texts = {
        f"{route} {one['name']}": one.get("description", "")
        for route, operation in operations()
        for one in operation.get("parameters", ())
    }
    for route, operation in operations():
        for status, response in operation["responses"].items():
            texts[f"{route} {status}"] = response.get("description", "")
    for schema_name, schema in described_schemas().items():
        for name, described in schema.get("properties", {}).items():
            texts[f"{schema_name}.{name}"] = described.get("description", "")
    assert len(texts) > 1000
    assert [where for where, text in texts.items() if not re.fullmatch(r"[A-Z`].*\.", text)] == []


def test_no_sentence_of_the_document_is_left_over() -> None:
    used = json.dumps(api_document())
    sentences = {
        **{f"parameter {name}": text for name, text in parameters.SENTENCES.items()},
        **{f"parameter {name}": text for name, text in parameters.OWN.items()},
        **{f"member {name}": text for name, text in members.SENTENCES.items()},
        **{f"member {name}": text for name, text in members.OWN.items()},
        **routes.PARAMETERS,
        **routes.RESPONSES,
    }
    assert [name for name, text in sentences.items() if json.dumps(text) not in used] == []


def test_each_parameter_of_a_body_is_in_one_group() -> None:
    bodies = [one for one in described_schemas().values() if GROUPS in one]
    assert len(bodies) == len(json_routes()) + 1  # and the form of files
    for schema in bodies:
        grouped = [name for group in schema[GROUPS] for name in group["parameters"]]
        assert sorted(grouped) == sorted(schema["properties"])
        assert "Others" not in [group["title"] for group in schema[GROUPS]]

"""What is enforced of a JSON schema, what says nothing, and what is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from shared.messages import InvalidParameter
from shared.text.json_schema import FORMATS, MAX_DEPTH, PATTERNS, WHITESPACE, grammar_schema
from tests.support.json_schemas import FORMATS as USED_FORMATS
from tests.support.json_schemas import random_schema

STYLE = {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def walked(schema: object, *, lenient: bool = False) -> dict[str, Any]:
    found = grammar_schema(schema, "response_format", lenient=lenient)
    assert found.pop("x-guidance") == STYLE["x-guidance"]
    return found


def refusal(schema: object) -> str:
    with pytest.raises(InvalidParameter) as refused:
        grammar_schema(schema, "response_format")
    assert refused.value.param == "response_format"
    return refused.value.message


@pytest.mark.parametrize("schema", [True, {}, {"title": "anything", "x-order": 1}])
def test_a_schema_that_asks_for_nothing_takes_any_value(schema: object) -> None:
    assert walked(schema) == {}


def test_annotations_are_left_out_at_every_depth_and_never_mistaken_for_names() -> None:
    noise = {"title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True}
    noise |= {"$comment": "c", "readOnly": True, "x-vendor": {"not": {}}, "uniqueItems": False}
    inner = {"type": "string", **noise}
    schema = {
        "type": "object",
        "properties": {"title": inner, "x-vendor": inner, "default": inner, "not": inner},
        "patternProperties": {"description": inner},
        "additionalProperties": inner,
        "$defs": {"examples": {"anyOf": [inner, {"items": inner}]}},
        "enum": [{"title": 1, "not": 2}],
        **noise,
    }
    text = {"type": "string"}
    assert walked(schema) == {
        "type": "object",
        "properties": {"title": text, "x-vendor": text, "default": text, "not": text},
        "patternProperties": {"description": text},
        "additionalProperties": text,
        "$defs": {"examples": {"anyOf": [text, {"items": text}]}},
        "enum": [{"title": 1, "not": 2}],
    }


def test_callers_cannot_set_the_compilers_own_options() -> None:
    requested = {"type": "integer", "x-guidance": {"lenient": True, "whitespace_flexible": False}}
    assert grammar_schema(requested, "p") == {"type": "integer", **STYLE}


@pytest.mark.promise(
    "Grammars: a schema that cannot be enforced is a 400 with name and path, before anything is "
    "queued"
)
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "is false"),
        ([], "must be an object"),
        ("{}", "must be an object"),
        ({"not": {"type": "string"}}, "uses 'not'"),
        ({"if": {}, "then": {"const": 1}}, "uses 'if', 'then'"),
        ({"propertyNames": {"pattern": "^a"}}, "uses 'propertyNames'"),
        ({"type": "array", "uniqueItems": True}, "uses 'uniqueItems'"),
        ({"nullable": True}, "uses 'nullable'"),
        ({"foo": 1, "not": {"const": 2}, "bar": 3}, "uses 'foo', 'not', 'bar', which is not"),
        (
            {"properties": {"a": {"items": {"contains": {}}}}},
            "#/properties/a/items uses 'contains'",
        ),
        ({"maxLenght": 3}, "uses 'maxLenght'"),
        ({"minProperties": 2}, "'minProperties' above 1"),
        ({"items": 3}, "#/items must be a schema"),
        ({"anyOf": [{}, None]}, "#/anyOf/1 must be a schema"),
        ({"const": 2**53 + 1}, "beyond 2**53"),
        ({"enum": [1, {"a": [-(2**60)]}]}, "beyond 2**53"),
        ({"maximum": 2**64}, "beyond 2**53"),
        ({"multipleOf": 123_457}, "at most 10000"),
        ({"multipleOf": "2"}, "must be a number"),
        ({"enum": ["x" * 9000]}, "8192 characters"),
        ({"pattern": "x" * 9000}, "8192 characters"),
        ({"properties": {"x" * 9000: {}}}, "8192 characters"),
        ({"enum": list(range(10_001))}, "10000 values"),
        ({"properties": {str(i): {} for i in range(1001)}}, "1000 members"),
        ({"patternProperties": {f"^{i}": {} for i in range(33)}}, "32 members"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "an interval shorter than 1"),
        ({"minimum": -0.5, "maximum": 3, "exclusiveMaximum": 0}, "an interval shorter than 1"),
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, "an interval shorter than 1"),
        ({"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(17)]}, "16 different"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_name(schema: object, words: str) -> None:
    assert words in refusal(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 0.25, "maximum": 0.5},
        {"exclusiveMinimum": 0},
        {"multipleOf": 0.0001},
        {"minProperties": 1},
        {"anyOf": [{"pattern": f"a{i}"} for i in range(100)]},
        {"type": "object", "properties": {str(i): {"pattern": f"a{i}"} for i in range(100)}},
    ],
)
def test_what_is_near_a_refusal_passes_as_it_is(schema: dict[str, Any]) -> None:
    assert walked(schema) == schema


def test_a_least_number_of_properties_that_are_required_anyway_is_no_matter() -> None:
    assert walked({"required": ["a", "b"], "minProperties": 2}) == {"required": ["a", "b"]}


def test_nesting_is_bounded_and_its_place_is_named_shortly() -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            schema = {"items": schema}
        return schema

    assert walked(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    assert len(refusal(nested(MAX_DEPTH + 1))) < 200
    value: Any = 1
    for _ in range(2000):
        value = [value]
    assert "nested" in refusal({"const": value})


def test_the_number_of_schemas_is_bounded() -> None:
    many = {"properties": {str(i): {"anyOf": [{}] * 20} for i in range(900)}}
    assert "10000 schemas" in refusal(many)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_string_format_combines_with_all_other_keywords(name: str) -> None:
    found = walked({"type": "string", "format": name, "pattern": "^2", "maxLength": 20})
    assert found["pattern"] == "^2"
    assert found["maxLength"] == 20
    if name in PATTERNS:
        assert found["allOf"] == [{"pattern": PATTERNS[name]}]
        assert walked({"format": name}) == {"pattern": PATTERNS[name]}
    else:
        assert found["format"] == name


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": "string", "title": "key"}},
        {"propertyNames": True},
        {"unevaluatedProperties": {}},
        {"dependentRequired": {}},
        {"not": False},
        {"if": {"const": 1}},
        {"then": {"const": 1}},
        {"if": {"const": 1}, "then": True, "else": {}},
        {"contains": {"const": 1}, "minContains": 0},
        {"format": "color"},
        {"format": "x-own"},
        {"format": 3},
        {"contentEncoding": "base64", "deprecated": True, "x-order": 1},
    ],
)
def test_what_restricts_no_value_is_left_out(schema: dict[str, Any]) -> None:
    assert walked({"type": "object", **schema}) == {"type": "object"}


def test_nullable_of_openapi_admits_null() -> None:
    nullable = {"nullable": True}
    assert walked({"type": "string", **nullable}) == {"type": ["string", "null"]}
    assert walked({"type": ["null", "integer"], **nullable}) == {"type": ["null", "integer"]}
    values = {"type": "string", "enum": ["a"], **nullable}
    assert walked(values) == {"type": ["string", "null"], "enum": ["a", None]}


def test_look_ahead_at_the_start_of_a_pattern_is_joined() -> None:
    schema = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert walked(schema) == {
        "type": "string",
        "pattern": r"^[+-]?0*\d*\.?\d*$",
        "allOf": [{"pattern": "[^-+.]"}],
    }


def test_a_format_of_numbers_and_a_format_without_rules_are_annotations() -> None:
    assert walked({"type": "integer", "format": "int64"}) == {"type": "integer"}
    assert walked({"type": ["number", "null"], "format": "x"}) == {"type": ["number", "null"]}
    assert walked({"type": "string", "format": "password"}) == {"type": "string"}


def test_names_of_hosts_and_mailboxes_are_as_long_as_they_may_be() -> None:
    assert walked({"format": "hostname"}) == {"format": "hostname", "maxLength": 253}
    assert walked({"format": "email", "maxLength": 900})["maxLength"] == 254


def test_lenient_leaves_out_what_cannot_be_enforced_but_keeps_the_bounds() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"not": {}}}
    assert walked(schema, lenient=True) == {"type": "array", "items": {}}
    with pytest.raises(InvalidParameter):
        grammar_schema({"multipleOf": 123_457}, "tools", lenient=True)


def test_the_random_schemas_are_schemas_and_use_every_format() -> None:
    assert set(USED_FORMATS) == FORMATS
    for seed in range(300):
        schema = random_schema(random.Random(seed))
        Draft202012Validator.check_schema(schema)
        json.dumps(walked(schema))
        assert schema == random_schema(random.Random(seed))

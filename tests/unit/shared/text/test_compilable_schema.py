"""A schema of a tool that is not strict: what cannot be enforced is left out, innermost first."""

from __future__ import annotations

import random
from typing import Any

import pytest

from api.generation.call_grammars import CALL_GRAMMARS
from api.generation.grammar_writer import ReasoningRule
from api.generation.grammars import tool_grammar
from api.generation.tools import Tool, ToolUse
from api.output_parsers.parser import Thinking
from shared.messages import InvalidParameter
from shared.text.compilable_schema import fault_in
from shared.text.json_schema import enforceable_schema
from shared.text.tool_formats import ToolFormat
from tests.unit.shared.text.test_grammar_compiler import compiler_of

LOOK_BEHIND = {"type": "string", "pattern": "(?<=x)a"}
CIRCLE = {"$ref": "#/$defs/a"}

ODD: dict[str, Any] = {
    "look-behind": LOOK_BEHIND,
    "look-ahead": {"type": "string", "pattern": "a(?!b)"},
    "back-reference": {"type": "string", "pattern": r"(a)\1"},
    "no pattern": {"type": "string", "pattern": "("},
    "broken reference": {"$ref": "#/nowhere"},
    "reference elsewhere": {"$ref": "https://example.com/schema.json"},
    "reference to itself": {"$ref": "#/properties/p"},
    "circle": {"$ref": "#/properties/p/$defs/a", "$defs": {"a": {"$ref": "#/properties/p"}}},
    "anchor": {"$ref": "#unknown"},
    "dynamic": {"$dynamicRef": "#node", "$recursiveRef": "#"},
    "no type": {"type": "nonsense"},
    "types": {"type": ["string", 3]},
    "no values": {"enum": []},
    "equal values": {"enum": [1, 1, "1"]},
    "large value": {"const": 2**60},
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"const": 1}, "then": {"const": 2}},
    "dependent": {"dependentSchemas": {"a": {"required": ["b"]}}, "dependencies": {"a": ["b"]}},
    "unevaluated": {"unevaluatedProperties": False, "unevaluatedItems": False},
    "contains": {"type": "array", "contains": {"type": "string"}, "uniqueItems": True},
    "empty range": {"type": "integer", "minimum": 3, "maximum": 2},
    "empty length": {"type": "string", "minLength": 3, "maxLength": 2},
    "joined types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "overlap": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "huge count": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "huge length": {"type": "string", "minLength": 10**7},
    "wrong count": {"type": "string", "maxLength": "x"},
    "draft 4": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "id": "x"},
    "draft 7": {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
    "openapi": {"type": "string", "nullable": True, "format": "binary", "example": 1},
    "key patterns": {"type": "object", "patternProperties": {"(?!x)": {}, "^a": {}, "a$": {}}},
    "multiple": {"type": "integer", "multipleOf": 123_457},
    "multiple of nothing": {"type": "integer", "multipleOf": 0},
    "true": True,
    "false": False,
    "no schema": 3,
    "null": None,
    "list": [],
    "properties": {"type": "object", "properties": [1], "required": "a"},
}


def tool_of(schema: Any, *, strict: bool = False) -> Tool:
    parameters = {"type": "object", "properties": {"p": schema, "n": {"type": "integer"}}}
    return Tool(
        name="look",
        description=None,
        parameters=parameters,
        strict=strict,
        param="tools.0.function",
        schema_param="tools.0.function.parameters",
    )


@pytest.mark.parametrize("required", [[], ["p"]])
@pytest.mark.parametrize("name", ODD)
def test_a_tool_that_is_not_strict_can_always_be_called(name: str, required: list[str]) -> None:
    compiler = compiler_of("byte_level")
    tool = tool_of(ODD[name])
    tool = Tool(
        name=tool.name,
        description=None,
        parameters={**tool.parameters, "required": required},
        strict=False,
        param=tool.param,
        schema_param=tool.schema_param,
    )
    use = ToolUse((tool,), (tool,), must_call=True)
    for form in (ToolFormat.HERMES, ToolFormat.QWEN3_CODER, ToolFormat.PYTHONIC):
        assert form in CALL_GRAMMARS
        grammar = tool_grammar(use, form, ReasoningRule(Thinking.NO), lambda _: None)
        compiler.check(grammar, "tools")


def test_the_innermost_fault_alone_is_left_out() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}, "price": LOOK_BEHIND},
        "required": ["price"],
    }
    schema = {
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/node"}, "n": {"minimum": 1}},
        "$defs": {"node": node},
    }
    mended = {**node, "properties": {**node["properties"], "price": {"type": "string"}}}  # type: ignore[dict-item]
    assert enforceable_schema(schema) == {**schema, "$defs": {"node": mended}}


def test_many_faults_are_all_found() -> None:
    names = [str(index) for index in range(300)]
    schema = {"type": "object", "properties": dict.fromkeys(names, LOOK_BEHIND)}
    assert enforceable_schema(schema)["properties"] == {name: {"type": "string"} for name in names}


def test_a_strict_tool_is_refused_by_its_name_a_pointer_and_the_keyword() -> None:
    for schema, words in (
        ({"items": LOOK_BEHIND}, ("#/properties/p/items", "'pattern'", "look-around")),
        ({"$ref": "#/nowhere"}, ("#/properties/p", "'$ref'")),
        ({"not": {}}, ("#/properties/p", "'not'")),
    ):
        tool = tool_of(schema, strict=True)
        use = ToolUse((tool,), (tool,), must_call=True)
        with pytest.raises(InvalidParameter) as refused:
            tool_grammar(use, ToolFormat.HERMES, ReasoningRule(Thinking.NO), lambda _: None)
        assert refused.value.param == tool.schema_param
        for word in (*words, "'look'"):
            assert word in refused.value.message
        assert "start:" not in refused.value.message


def test_a_schema_without_a_fault_is_left_alone() -> None:
    chooser = random.Random(1)
    schema = {
        "type": "object",
        "properties": {str(i): {"type": chooser.choice(["string", "null"])} for i in range(9)},
    }
    assert fault_in(schema) is None
    assert enforceable_schema(schema) == schema

"""Parameters one by one: their types by the schema, and what a strict tool may say of them."""

from __future__ import annotations

from typing import Any

import pytest

from api.generation import parameter_grammars
from api.generation.grammar_writer import ReasoningRule
from api.generation.grammars import tool_grammar
from api.generation.parameters import parameter_types, parameters
from api.generation.tools import Tool, ToolUse
from api.output_parsers.parser import Thinking
from api.output_parsers.typed_values import json_of
from shared.messages import InvalidParameter
from shared.text.tool_formats import ToolFormat


def tool(schema: dict[str, Any], *, strict: bool = False) -> Tool:
    return Tool(
        name="f",
        description=None,
        parameters={"type": "object", **schema},
        strict=strict,
        param="tools.0.function",
        schema_param="tools.0.function.parameters",
    )


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, ("string",)),
        ({"type": ["integer", "null"]}, ("integer", "null")),
        ({"type": "integer", "nullable": True}, ("integer", "null")),
        ({"enum": ["a", 1, None, 2.5, True]}, ("boolean", "integer", "null", "number", "string")),
        ({"const": []}, ("array",)),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ("null", "string")),
        ({"oneOf": [{"type": "string"}, {}]}, ()),
        ({"$ref": "#/$defs/days"}, ("integer",)),
        ({"$ref": "#/$defs/loop"}, ()),
        ({"$ref": "#/nowhere"}, ()),
        ({}, ()),
        ({"type": 5}, ()),
        ({"const": 1, "enum": None}, ("integer",)),
        ({"const": 1, "enum": 5}, ("integer",)),
        ({"enum": 5}, ()),
    ],
)
def test_types_are_those_of_the_schema(schema: dict[str, Any], types: tuple[str, ...]) -> None:
    definitions = {"days": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    found = parameter_types(tool({"properties": {"a": schema}, "$defs": definitions}))
    assert found.get("a", ()) == types


class Visited(dict[str, Any]):
    """A schema that counts how often its alternatives are read."""

    count = 0

    def get(self, key: str, default: Any = None) -> Any:
        Visited.count += key == "anyOf"
        return super().get(key, default)


def branching(width: int) -> dict[str, Any]:
    """Schemas that refer to the next one `width` times: width**8 ways to the last."""
    chain = {
        f"a{at}": Visited(anyOf=[{"$ref": f"#/$defs/a{at + 1}"} for _ in range(width)])
        for at in range(7)
    }
    definitions = {**chain, "a7": {"type": "string"}}
    return {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": definitions}


def test_each_schema_is_read_once_however_many_refer_to_it() -> None:
    Visited.count = 0
    assert parameter_types(tool(branching(4))) == {"a": ("string",)}
    assert Visited.count < 50


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("5", ("string",), '"5"'),
        ("5", (), "5"),
        (" 5\n", ("integer",), "5"),
        ("5.0", ("integer",), "5.0"),
        ("5.5", ("integer",), '"5.5"'),
        ("5", ("null", "string"), '"5"'),
        ("null", ("null", "string"), "null"),
        ("True", ("boolean",), "true"),
        ("None", ("integer", "null"), "null"),
        ("None", ("null", "string"), '"None"'),
        ('{"a": [1]}', ("object",), '{"a": [1]}'),
        ('{"a": [1}', ("object",), '"{\\"a\\": [1}"'),
        ('"a"', (), '"\\"a\\""'),
        ("NaN", ("number",), '"NaN"'),
        ("[" * 100_000, (), '"' + "[" * 100_000 + '"'),
        ("", ("integer",), '""'),
        ("é\n", ("string",), '"é\\n"'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_become_what_the_types_allow(
    text: str, types: tuple[str, ...], written: str
) -> None:
    assert json_of(text, types) == written


def test_required_parameters_come_first_and_others_only_where_the_schema_leaves_room() -> None:
    schema = {"properties": {"a": {}, "b": {"type": "integer"}}, "required": ["b"]}
    found = parameters(tool(schema))
    assert [(each.name, each.is_required) for each in found.named] == [("b", True), ("a", False)]
    assert not found.is_open  # a schema that says nothing of others is not a wish for others
    assert parameters(tool({**schema, "additionalProperties": True})).is_open
    assert parameters(tool({"required": ["c"]})).named[0].name == "c"


TAGGED = (ToolFormat.GLM45, ToolFormat.QWEN3_CODER, ToolFormat.MINIMAX_M2)
SEPARATED = (ToolFormat.PYTHONIC, ToolFormat.FUNCTIONGEMMA, ToolFormat.GEMMA4)


def text_of(form: ToolFormat, schema: dict[str, Any], *, strict: bool) -> str:
    use = ToolUse((made := (tool(schema, strict=strict),)), made, must_call=True)
    return tool_grammar(use, form, ReasoningRule(Thinking.NO), lambda token: None).text


@pytest.mark.parametrize("form", [*TAGGED, *SEPARATED])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "string"}}, "maxProperties": 1}, "'maxProperties'"),
        ({"additionalProperties": {"type": "integer"}}, "'additionalProperties'"),
        ({"properties": {"a": {"not": {"type": "integer"}, "type": "integer"}}}, "'not'"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_for_a_strict_tool_alone(
    form: ToolFormat, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidParameter, match=named) as caught:
        text_of(form, schema, strict=True)
    assert caught.value.param == "tools.0.function.parameters"
    assert text_of(form, schema, strict=False)


@pytest.mark.parametrize("form", [*TAGGED, ToolFormat.FUNCTIONGEMMA, ToolFormat.GEMMA4])
def test_the_pattern_of_a_text_without_quotes_is_refused_for_a_strict_tool(
    form: ToolFormat,
) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^x"}}}
    with pytest.raises(InvalidParameter, match="'pattern' of a text"):
        text_of(form, schema, strict=True)
    assert text_of(form, schema, strict=False)
    assert "^x" in text_of(ToolFormat.PYTHONIC, schema, strict=True)


@pytest.mark.parametrize("form", [*TAGGED, ToolFormat.FUNCTIONGEMMA, ToolFormat.GEMMA4])
def test_a_grammar_has_no_more_alternatives_than_the_schema_is_worth(
    form: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond is any text; a strict tool's is refused."""
    schema = branching(8)
    whole = text_of(form, branching(2), strict=True)
    monkeypatch.setattr(parameter_grammars, "MAX_ALTERNATIVES", 64)
    Visited.count = 0
    assert text_of(form, branching(2), strict=True) == whole
    assert text_of(form, schema, strict=False).count(" | ") <= 2 * 64
    assert Visited.count < 200
    with pytest.raises(InvalidParameter, match="more than 64 alternatives") as caught:
        text_of(form, schema, strict=True)
    assert caught.value.param == "tools.0.function.parameters"

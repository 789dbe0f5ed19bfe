"""From the members of a request to one grammar, or to an error that names the member."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.dialects.chat.protocol import ChatRequest
from api.dialects.completions.protocol import CompletionRequest
from api.generation.grammars import check_grammar
from api.generation.models import ServedModel
from api.generation.prompt import RequestedGrammar, requested_grammar
from api.generation.validation import parse_request
from shared.messages import GrammarKind, InvalidParameter
from shared.text.text_model import load_text
from tests.support.checkpoints import card_of, make_checkpoint

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
GBNF = 'root ::= "yes" | "no"'


def completion(**members: Any) -> CompletionRequest:
    return parse_request({"model": "m", "prompt": "p", **members}, CompletionRequest)


def requested(**members: Any) -> RequestedGrammar:
    found = requested_grammar(completion(**members))
    assert found is not None
    return found


def schema_of(**members: Any) -> Any:
    found = requested(**members)
    assert found.grammar.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(found.grammar.text)
    assert "whitespace_pattern" in schema.pop("x-guidance")
    return schema


def named(**members: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY, **members}}


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text"}, "guided_regex": None},
    ],
)
def test_any_text_will_do(members: dict[str, Any]) -> None:
    assert requested_grammar(completion(**members)) is None


@pytest.mark.parametrize(
    ("members", "schema"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": STRICT}, CITY),
        ({"response_format": named(strict=False, description="A city.")}, CITY),
        ({"response_format": named(strict=None, description=None)}, CITY),
        ({"response_format": named(schema=None)}, {}),
        ({"response_format": named(schema={})}, {}),
        ({"response_format": named(schema=True)}, {}),
        ({"guided_json": CITY}, CITY),
        ({"guided_json": json.dumps(CITY)}, CITY),
        ({"guided_json": True}, {}),
        ({"structured_outputs": {"json": CITY}}, CITY),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"structured_outputs": {"json": CITY, "regex": None}}, CITY),
    ],
)
def test_json_can_be_requested_in_several_ways(members: dict[str, Any], schema: object) -> None:
    assert schema_of(**members) == schema


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"guided_regex": r"\d+"}, GrammarKind.REGEX),
        ({"guided_choice": ["yes", "no"]}, GrammarKind.REGEX),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK),
        ({"guided_grammar": GBNF}, GrammarKind.LARK),
    ],
)
def test_so_are_other_forms(members: dict[str, Any], kind: GrammarKind) -> None:
    found = requested(**members)
    ((name, value),) = members.items()
    assert (found.grammar.kind, found.param) == (kind, name)
    nested = requested(structured_outputs={name.removeprefix("guided_"): value})
    assert nested.grammar == found.grammar
    assert nested.param == f"structured_outputs.{name.removeprefix('guided_')}"


@pytest.mark.parametrize(
    ("members", "param", "words"),
    [
        ({"response_format": {}}, "response_format.type", "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', "),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema",
            "Unknown parameter",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": named(name=None)}, "response_format.json_schema.name", "a string"),
        ({"response_format": named(name="a b")}, "response_format.json_schema.name", "pattern"),
        ({"response_format": named(strict=1)}, "response_format.json_schema.strict", "a boolean"),
        (
            {"response_format": named(description=7)},
            "response_format.json_schema.description",
            "a string",
        ),
        (
            {"response_format": named(mode="x")},
            "response_format.json_schema.mode",
            "Unknown parameter",
        ),
        ({"response_format": named(schema=False)}, "response_format.json_schema.schema", "false"),
        ({"response_format": named(schema="{}")}, "response_format.json_schema.schema", "object"),
        (
            {"response_format": named(schema={"properties": {"a": {"not": {}}}})},
            "response_format.json_schema.schema",
            "#/properties/a uses 'not'",
        ),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be an object"),
        ({"guided_json": {"if": {}, "then": {"const": 1}}}, "guided_json", "'if'"),
        ({"guided_regex": ""}, "guided_regex", "1 to"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": [1]}, "guided_choice.0", "a string"),
        ({"guided_grammar": "start: %json 3"}, "guided_grammar", "%json"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "a string"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "boolean"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "Unknown parameter",
        ),
        ({"response_format": STRICT, "guided_regex": "a"}, "guided_regex", "'response_format'"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "'guided_json'"),
        (
            {"response_format": STRICT, "structured_outputs": {"json": {}}},
            "structured_outputs",
            "'response_format'",
        ),
    ],
)
def test_what_is_wrong_is_named(members: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        requested_grammar(completion(**members))
    assert refused.value.param == param
    assert words in refused.value.message


def test_both_dialects_have_the_members_and_null_is_absent() -> None:
    body: dict[str, Any] = {"model": "m", "guided_regex": "a+", "guided_json": None}
    messages = [{"role": "user", "content": "a"}]
    for request in (parse_request({**body, "messages": messages}, ChatRequest), completion(**body)):
        found = requested_grammar(request)
        assert found is not None
        assert found.param == "guided_regex"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("model"))
    card, blobs = card_of(path, max_model_len=512, structured_output=True)
    return ServedModel(card, load_text(card, blobs))


def test_a_grammar_is_compiled_for_the_model(model: ServedModel) -> None:
    check_grammar(model, requested(response_format=STRICT))
    with pytest.raises(InvalidParameter, match="regex parse error") as refused:
        check_grammar(model, requested(guided_regex="a("))
    assert refused.value.param == "guided_regex"


def test_a_model_without_structured_output_refuses_every_form(model: ServedModel) -> None:
    echo = replace(model, card=replace(model.card, structured_output=False))
    with pytest.raises(InvalidParameter) as refused:
        check_grammar(echo, requested(response_format=STRICT))
    assert refused.value.param == "response_format.json_schema.schema"
    assert refused.value.code == "structured_output_not_supported"

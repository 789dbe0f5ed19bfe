"""From what callers write to grammars."""

from __future__ import annotations

import json

import pytest

from shared.messages import MAX_GRAMMAR_CHARS, GrammarKind, InvalidParameter
from shared.text.grammar import (
    MAX_LARK_CHARS,
    MAX_RULES,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

GBNF = 'root ::= "ab" ws item (ws item){2,3}\nws ::= [ \\t]+\nitem ::= [0-9]+ | "x"'


def test_json_grammars_are_schemas_with_bounded_white_space() -> None:
    grammar = json_object_grammar()
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(grammar.text)
    assert schema.pop("x-guidance")["whitespace_pattern"]
    assert schema == {"type": "object"}


def test_the_order_of_properties_is_kept() -> None:
    grammar = json_schema_grammar({"properties": {"z": {}, "ä": {}, "a": {}}}, "p")
    assert list(json.loads(grammar.text)["properties"]) == ["z", "ä", "a"]
    assert "ä" in grammar.text


def test_classes_in_a_regex_are_ascii() -> None:
    assert regex_grammar(r"\d\w\\d/", "p").text == r"[0-9][0-9a-zA-Z_]\\d\/"


def test_choices_are_taken_literally_and_once() -> None:
    text = choice_grammar(["a.b", "c|d", "a.b", "(é)\n"], "p").text
    assert text == "(?:a\\.b|c\\|d|\\(é\\)\n)"


def test_the_schemas_within_a_lark_grammar_are_read_as_all_others() -> None:
    text = 'start: "a" x\nx: %json  {"type": "string", "title": "t", "format": "uuid"}\n'
    grammar = lark_grammar(text, "p")
    assert grammar.kind is GrammarKind.LARK
    assert '"title"' not in grammar.text
    assert grammar.text.startswith('start: "a" x\nx: %json  {"type": "string", "format": "uuid", ')
    assert grammar.text.endswith("}\n")
    assert "%json  {}" not in lark_grammar("start: %json true", "p").text


def test_gbnf_is_translated() -> None:
    text = lark_grammar(GBNF, "guided_grammar").text
    assert "start:" in text
    assert "::=" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start: %json 3", "follow each %json"),
        ('start: "%json"', "follow each %json"),
        ('start: %json {"type": }', "follow each %json"),
        ('start: %json {"not": {}}', "uses 'not'"),
        ('start: x\nx[temperature=0.5]: "a"', "'temperature'"),
        ('start: x\nx[lazy, stop="\\n"]: /.*/', "'stop'"),
        ("start: " + '"a" ' * MAX_LARK_CHARS, f"{MAX_LARK_CHARS} characters"),
        ("\n".join(f"r{i}: r{i + 1}" for i in range(MAX_RULES + 1)), f"{MAX_RULES} rules"),
        ("start: A\nA: " + " & ".join(["/a/"] * 18), "'&'"),
        ("root ::= (", "is not valid GBNF"),
        ("root ::= " + "(" * 9000, "is not valid GBNF"),
        ("root ::= missing", "is not valid GBNF"),
        ('x ::= "a"', "is not valid GBNF"),
        ("\n".join(f"r{i} ::= r{i + 1}" for i in range(MAX_RULES + 1)), f"{MAX_RULES} rules"),
        ('start: "\ud800"', "surrogate U+D800"),
    ],
)
def test_a_lark_grammar_is_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        lark_grammar(text, "guided_grammar")
    assert refused.value.param == "guided_grammar"
    assert words in refused.value.message


def test_other_grammars_are_refused_with_a_reason() -> None:
    for make, words in (
        (lambda: regex_grammar("a" * 20_000, "p"), "16384 characters"),
        (lambda: regex_grammar("\udc00", "p"), "surrogate"),
        (lambda: choice_grammar([], "p"), "1 to 10000"),
        (lambda: choice_grammar(["a"] * 10_001, "p"), "1 to 10000"),
        (lambda: choice_grammar(["a" * 9000], "p"), "8192 characters"),
        (lambda: choice_grammar(["x" * 8000 + str(i) for i in range(40)], "p"), "characters"),
        (lambda: json_schema_grammar({"const": "\ud800"}, "p"), "surrogate"),
        (
            lambda: json_schema_grammar({"enum": ["x" * 8000 + str(i) for i in range(40)]}, "p"),
            f"{MAX_GRAMMAR_CHARS} characters",
        ),
    ):
        with pytest.raises(InvalidParameter, match=words) as refused:
            make()
        assert refused.value.param == "p"


def test_nothing_is_a_choice_but_no_regex() -> None:
    assert choice_grammar([""], "p").text == "(?:)"
    for make in (regex_grammar, lark_grammar):
        with pytest.raises(InvalidParameter, match="must have 1 to"):
            make("", "p")

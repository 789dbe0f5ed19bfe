"""What admission lets through does run: its bounds are tighter than those of a run."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from shared.messages import Grammar, InvalidParameter
from shared.text import grammar_compiler
from shared.text.checkpoint_text import load_tokenizer_and_eos
from shared.text.grammar import json_schema_grammar, lark_grammar, regex_grammar
from shared.text.grammar_compiler import GrammarCompiler
from tests.unit.shared.text.test_grammar_compiler import compiler_of, ends_of, tokenizer_of
from worker.settings import DEMO_CHECKPOINT

STEPS = 30


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of("byte_level")


ENDS = frozenset(ends_of(tokenizer_of("byte_level")))
TABLE = tokenizer_of("byte_level").piece_table(tokenizer_of("byte_level").vocab_size)


def optional(num: int, prefix: str = "p", **members: Any) -> dict[str, Any]:
    properties = {f"{prefix}{i}": {"type": "integer"} for i in range(num)}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **members,
    }


def optional_properties(num: int) -> Grammar:
    return json_schema_grammar(optional(num), "p")


def behind_a_path(num: int) -> Grammar:
    inner: dict[str, Any] = optional(num)
    for name in ("c", "b", "a"):
        inner = {"type": "object", "properties": {name: inner}, "required": [name]}
    return json_schema_grammar(inner, "p")


def alternatives(num: int) -> Grammar:
    schemas = [optional(num // 10, f"a{k}_") for k in range(10)]
    return json_schema_grammar({"type": "array", "items": {"anyOf": schemas}}, "p")


def joined(num: int) -> Grammar:
    parts = [optional(num // 2, name, additionalProperties=True) for name in "ab"]
    return json_schema_grammar({"allOf": parts}, "p")


def referred(num: int) -> Grammar:
    half = {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}
    definitions = {"x": optional(num // 2, "x"), "y": optional(num // 2, "y")}
    return json_schema_grammar({**half, "$defs": definitions}, "p")


def object_values(num: int) -> Grammar:
    return json_schema_grammar({"enum": [{"a": i} for i in range(num)]}, "p")


def optional_letters(num: int) -> Grammar:
    return regex_grammar("a?" * num, "p")


def optional_groups(num: int) -> Grammar:
    return regex_grammar("(a?b?c?)" * (num // 3), "p")


def lark_chain(num: int) -> Grammar:
    return lark_grammar("start: " + ' "a"?' * num, "p")


def lark_chain_behind_text(num: int) -> Grammar:
    return lark_grammar(f'start: "{"x" * 500}"' + ' "a"?' * num, "p")


def lark_ambiguous(num: int) -> Grammar:
    return lark_grammar("start: " + ' "a"*' * num, "p")


SIZES = (50, 400, 600, 1500, 4000)
MAKERS = (
    optional_properties,
    behind_a_path,
    alternatives,
    joined,
    referred,
    object_values,
    optional_letters,
    optional_groups,
    lark_chain,
    lark_chain_behind_text,
    lark_ambiguous,
)


def walk(matcher: LLMatcher, seed: int) -> None:
    """Generates some tokens: at random, or (even seeds) the longest token that may come."""
    assert TABLE is not None
    chooser = random.Random(1000 + seed)
    for step in range(STEPS):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), f"step {step}: {matcher.get_error()[:200]}"
        ids = [i for i in range(len(TABLE)) if mask[i // 8] >> i % 8 & 1 and i not in ENDS]
        if not ids:
            return
        token_id = max(ids, key=lambda i: len(TABLE[i])) if seed % 2 == 0 else chooser.choice(ids)
        assert matcher.consume_token(token_id), matcher.get_error()[:200]


def refusal_of(make: Any, size: int, compiler: GrammarCompiler) -> InvalidParameter | None:
    try:
        compiler.check(make(size), "p")
    except InvalidParameter as error:
        return error
    return None


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_admitted_runs_and_the_rest_is_refused_by_name(
    make: Any, compiler: GrammarCompiler
) -> None:
    was_admitted = []
    for size in SIZES:
        refusal = refusal_of(make, size, compiler)
        was_admitted.append(refusal is None)
        if refusal is None:
            for seed in range(2):
                walk(compiler.matcher(make(size)), seed)
        else:
            assert refusal.param == "p"
            assert re.search("too (many|large|big)|more than", refusal.message), refusal.message
    assert was_admitted[0] or make is lark_ambiguous
    assert was_admitted == sorted(was_admitted, reverse=True), "a larger one was admitted"


def test_a_thousand_optional_properties_are_admitted(compiler: GrammarCompiler) -> None:
    for grammar in (optional_properties(1000), behind_a_path(1000)):
        compiler.check(grammar, "p")
        walk(compiler.matcher(grammar), 0)


def test_the_place_that_is_too_large_is_named() -> None:
    schemas = [optional(500, f"a{k}_") for k in range(4)]
    schema = {"type": "object", "properties": {"deep": {"anyOf": schemas}}}
    with pytest.raises(InvalidParameter, match="#/properties/deep") as refused:
        json_schema_grammar(schema, "response_format.json_schema.schema")
    assert refused.value.param == "response_format.json_schema.schema"


def test_references_in_a_circle_are_counted() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
            "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
        },
    }
    json_schema_grammar(schema, "p")


PROGRAM = r"""start: stmt+
stmt: simple NL | "if " expr ":" block | "while " expr ":" block | "def " NAME "(" args? ")" block
block: NL INDENT stmt+
simple: NAME " = " expr | "return " expr | expr | "pass"
args: NAME ("," " "? NAME)*
expr: and (" or " and)*
and: cmp (" and " cmp)*
cmp: sum ((" < " | " > " | " == ") sum)*
sum: term ((" + " | " - ") term)*
term: atom ((" * " | " / ") atom)*
atom: NAME | NUM | STR | "(" expr ")" | atom "(" list? ")" | atom "." NAME | "[" list? "]"
list: expr ("," " "? expr)*
NAME: /[a-zA-Z_][a-zA-Z0-9_]*/
NUM: /[0-9]+(\.[0-9]+)?/
STR: /"[^"\\\n]*"/
NL: /\n/
INDENT: /    /
"""


def tool(number: int) -> dict[str, Any]:
    arguments = optional(6, f"t{number}_")
    named = {"name": {"const": f"tool_{number}"}, "arguments": arguments}
    return {"type": "object", "properties": named, "required": [*named]}


NODE = {"type": "object", "properties": {"v": {"type": "string"}, "c": {"$ref": "#/$defs/nodes"}}}
NODES = {"type": "array", "items": {"$ref": "#/$defs/node"}}
HONEST = {
    "128 tools": json_schema_grammar({"anyOf": [tool(i) for i in range(128)]}, "p"),
    "recursive": json_schema_grammar(
        {"$ref": "#/$defs/node", "$defs": {"node": NODE, "nodes": NODES}}, "p"
    ),
    "200 optional": optional_properties(200),
    "address": regex_grammar(r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}", "p"),
    "any text": regex_grammar(r".{1,2000}", "p"),
    "program": lark_grammar(PROGRAM, "p"),
    "sums": lark_grammar('start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/\n', "p"),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_grammars_are_admitted_and_run(name: str, compiler: GrammarCompiler) -> None:
    compiler.check(HONEST[name], "p")
    for seed in range(4):
        walk(compiler.matcher(HONEST[name]), seed)


def test_a_grammar_whose_masks_take_long_is_refused_with_what_to_simplify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_compiler, "MASK_CPU_SECONDS", 0.002)  # of 4,096 tokens, not 49,000
    tokenizer, ends = load_tokenizer_and_eos(DEMO_CHECKPOINT)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, ends)
    compiler.build()
    compiler.check(HONEST["program"], "guided_grammar")
    before_s = time.process_time()
    with pytest.raises(InvalidParameter, match="can be read in only one way") as refused:
        compiler.check(lark_grammar("start: s\ns: s s | /[a-z ]/\n", "p"), "guided_grammar")
    assert refused.value.param == "guided_grammar"
    assert time.process_time() - before_s < 2 * grammar_compiler.FIRST_PROBE_CPU_SECONDS

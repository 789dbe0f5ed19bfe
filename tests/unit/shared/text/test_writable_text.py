"""Grammars over a byte-level vocabulary that lacks tokens for some bytes."""

from __future__ import annotations

import json
import random
import string

import numpy as np
import pytest

from shared.messages import Grammar, InvalidParameter
from shared.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.tokenizer import FastTokenizer
from shared.text.writable_text import UTF8_BYTES, WritableText
from tests.unit.shared.text.vocabularies import SENTENCES, byte_level_of

PRINTABLE = "".join(map(chr, range(0x20, 0x7F))) + "\n\t"
MAX_TOKENS = 400
FAR = "\U00040000"  # its first byte, F1, is in none of the texts


def compiler_of(*texts: str) -> GrammarCompiler:
    tokenizer = FastTokenizer.from_bytes(byte_level_of(*texts).to_str().encode())
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [end])


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of(PRINTABLE, *SENTENCES)


def sampled(compiler: GrammarCompiler, grammar: Grammar, seed: int) -> tuple[str, bool]:
    """Returns a random output, and whether it ended by itself."""
    chooser, matcher, output = random.Random(seed), compiler.matcher(grammar), b""
    table = compiler._tokenizer.piece_table(compiler.vocab_size)
    assert table is not None
    for _ in range(MAX_TOKENS):
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        assert not matcher.is_error(), (grammar.text, output)
        token_id = int(chooser.choice(list(allowed)))
        if token_id in compiler._eos_token_ids:
            return output.decode(), True
        assert matcher.consume_token(token_id)
        output += table[token_id]
    return output.decode(errors="ignore"), False


def refusal(compiler: GrammarCompiler, grammar: Grammar) -> str:
    with pytest.raises(InvalidParameter) as refused:
        compiler.check(grammar, "p")
    return refused.value.message


NAME = {"type": "object", "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (choice_grammar([f"a{FAR}", "a\x04", "ab"], "p"), {"ab"}),
        (regex_grammar(r"a(\x04|[\x05-\x06]|c)", "p"), {"ac"}),
        (regex_grammar(f"[{FAR}ü]", "p"), {"ü"}),
        (json_schema_grammar({"enum": [f"x{FAR}", "x", [FAR]]}, "p"), {'"x"'}),
        (json_schema_grammar({"type": "string", "pattern": f"^({FAR}|b)$"}, "p"), {'"b"'}),
        (json_schema_grammar({"const": "a\x04"}, "p"), {'"a\\u0004"'}),
        (lark_grammar(f'start: "x" %json {{"enum": ["{FAR}", 1]}}', "p"), {"x1"}),
    ],
)
def test_a_branch_that_cannot_be_written_is_not_taken(
    compiler: GrammarCompiler, grammar: Grammar, expected: set[str]
) -> None:
    compiler.check(grammar, "p")
    assert {sampled(compiler, grammar, seed)[0].strip() for seed in range(8)} == expected


@pytest.mark.parametrize(
    ("grammar", "char"),
    [
        (choice_grammar([f"a{FAR}"], "p"), "U+40000"),
        (choice_grammar(["a\x04", "\x06"], "p"), "U+0004"),
        (regex_grammar(r"ab\x04+", "p"), "U+0004"),
        (json_schema_grammar({"const": f"a{FAR}"}, "p"), "U+40000"),
        (json_schema_grammar({**NAME, "properties": {"a": {"enum": [FAR]}}}, "p"), "U+40000"),
        (json_schema_grammar({"type": "object", "required": [FAR]}, "p"), "U+40000"),
        (json_schema_grammar({"type": "string", "pattern": f"^{FAR}$"}, "p"), "U+40000"),
        (lark_grammar('start: "a" "\\u0004"', "p"), "U+0004"),
        (lark_grammar(f'start: "a" %json {{"const": "{FAR}"}}', "p"), "U+40000"),
        (choice_grammar(["дом 火"], "p"), "'火'"),
    ],
)
def test_a_grammar_that_needs_a_missing_byte_is_refused_by_the_characters_name(
    compiler: GrammarCompiler, grammar: Grammar, char: str
) -> None:
    message = refusal(compiler, grammar)
    assert message == (
        f"the model's vocabulary has no token for the character {char}, which the grammar needs"
    )


def test_free_json_is_valid_and_never_stuck(compiler: GrammarCompiler) -> None:
    schema = {
        **NAME,
        "properties": {"a": {"type": "string", "maxLength": 30}, "b": {"pattern": "^[^a-z]{3}$"}},
    }
    grammar = json_schema_grammar(schema, "p")
    compiler.check(grammar, "p")
    ended = [
        text for text, is_whole in (sampled(compiler, grammar, i) for i in range(20)) if is_whole
    ]
    assert ended
    for text in ended:
        json.loads(text)
    compiler.check(json_object_grammar(), "p")


@pytest.mark.parametrize("missing", ["{", "}", '"', ":", ",", "7", "u"])
def test_json_is_refused_where_one_of_its_signs_cannot_be_written(missing: str) -> None:
    compiler = compiler_of(PRINTABLE.replace(missing, ""))
    assert refusal(compiler, json_object_grammar()) == (
        f"JSON cannot be written: the model's vocabulary has no token for the character "
        f"{missing!r}, which the grammar needs"
    )
    letters = regex_grammar("[a-z]{3}", "p")
    compiler.check(letters, "p")
    assert set(sampled(compiler, letters, 1)[0]) <= set(string.ascii_lowercase)


def test_the_class_of_writable_characters_is_exact_where_it_is_small() -> None:
    present = UTF8_BYTES - {0x04, 0x06, 0xF1, 0xF2}
    writable = WritableText(present)
    assert writable.unwritable("a\x05ü火\U00010000") is None
    assert writable.unwritable("a\x04\x06") == "\x04"
    assert writable.narrows(r"\x05")
    assert not writable.narrows("a(b|c)*[0-9]{2}.")
    assert not WritableText(UTF8_BYTES).narrows(FAR)

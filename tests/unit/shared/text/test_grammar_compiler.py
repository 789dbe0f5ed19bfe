"""Grammars over vocabularies of every kind: exactly the tokens that fit, bounded work, no crash."""

from __future__ import annotations

import json
import threading
import time

import pytest
from llguidance import LLMatcher

from shared.messages import Grammar, GrammarKind, InvalidParameter
from shared.text.base import GrammarInvalid
from shared.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from shared.text.grammar_compiler import MAX_KEPT, GrammarCompiler
from shared.text.tokenizer import FastTokenizer
from tests.unit.shared.text.vocabularies import ALL, saved

USABLE = ("byte_level", "bytes_only", "llama", "gemma")
CLOSED = {"additionalProperties": False}
PADDING = 37  # rows of the model behind the tokenizer's last


def tokenizer_of(kind: str) -> FastTokenizer:
    return FastTokenizer.from_bytes(saved(kind))


def ends_of(tokenizer: FastTokenizer) -> tuple[int, ...]:
    names = ("<|im_end|>", "<|endoftext|>", "</s>", "<unk>", "[SEP]")
    return tuple(i for i in map(tokenizer.token_id, names) if i is not None)[:2]


def compiler_of(kind: str, ends: tuple[int, ...] | None = None) -> GrammarCompiler:
    tokenizer = tokenizer_of(kind)
    size = tokenizer.vocab_size + PADDING
    return GrammarCompiler(tokenizer, size, ends_of(tokenizer) if ends is None else ends)


def allowed(matcher: LLMatcher, compiler: GrammarCompiler) -> set[int]:
    bits = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    found = {i for i in range(len(bits) * 8) if bits[i // 8] >> i % 8 & 1}
    assert max(found, default=0) < compiler.vocab_size
    return found


@pytest.mark.promise(
    "Grammars: exactly the matching tokens are allowed, special ones only where they are named"
)
@pytest.mark.parametrize("kind", USABLE)
def test_exactly_the_tokens_that_begin_a_way_on_are_allowed(kind: str) -> None:
    texts = [text.encode() for text in ("yes", "yesterday", "The quick", "seen", "1234", "")]
    tokenizer, compiler = tokenizer_of(kind), compiler_of(kind)
    ends = set(ends_of(tokenizer))
    grammar = choice_grammar([text.decode() for text in texts], "p")
    table = tokenizer.piece_table(compiler.vocab_size)
    assert table is not None
    ordinary = {i for i, piece in enumerate(table) if piece} - tokenizer.marker_ids - ends
    todo, seen = [[]], {b""}  # type: ignore[var-annotated]
    while todo:
        output = todo.pop()
        matcher = compiler.matcher(grammar)
        assert matcher.consume_tokens(output)
        text = b"".join(table[i] for i in output)
        ways = {whole[len(text) :] for whole in texts if whole.startswith(text)}
        fitting = {i for i in ordinary if any(way.startswith(table[i]) for way in ways)}
        found = allowed(matcher, compiler)
        assert found & ends == (ends if b"" in ways else set())
        if len({way[:1] for way in ways}) > 1:  # of entries with the same text one is enough
            assert {table[i] for i in found - ends} == {table[i] for i in fitting}
        else:  # what is forced comes as the model was trained to see it
            assert found - ends <= fitting
        for token_id in found - ends:
            if (longer := text + table[token_id]) not in seen:
                seen.add(longer)
                todo.append([*output, token_id])
    assert seen >= set(texts)


@pytest.mark.parametrize("kind", sorted(set(ALL) - set(USABLE)))
def test_a_vocabulary_that_is_not_one_of_bytes_is_refused(kind: str) -> None:
    """Its tokens depend on their neighbours, or cannot spell every text."""
    with pytest.raises(GrammarInvalid, match="the model's vocabulary"):
        compiler_of(kind).build()
    with pytest.raises(InvalidParameter, match="the model's vocabulary"):
        compiler_of(kind).check(json_object_grammar(), "response_format")


@pytest.mark.parametrize("ends", [(), (10_000,)])
def test_without_an_end_there_is_no_grammar(ends: tuple[int, ...]) -> None:
    with pytest.raises(GrammarInvalid, match="no end-of-sequence"):
        compiler_of("byte_level", ends).build()


@pytest.mark.parametrize("kind", USABLE)
def test_text_never_becomes_a_special_token_or_a_row_without_an_entry(kind: str) -> None:
    tokenizer, compiler = tokenizer_of(kind), compiler_of(kind)
    found = allowed(compiler.matcher(regex_grammar(r"(.|\n)*", "p")), compiler)
    marker = tokenizer.token_id("<tool_call>")
    assert marker in tokenizer.marker_ids
    assert found & tokenizer.marker_ids == set(ends_of(tokenizer))
    assert max(found) < tokenizer.vocab_size
    assert len(found) > 0.6 * tokenizer.vocab_size


def test_an_end_token_of_the_models_own_is_never_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    letter = tokenizer.token_id("a")
    assert letter is not None
    compiler = compiler_of("byte_level", (letter,))
    assert letter not in allowed(compiler.matcher(regex_grammar("ab?", "p")), compiler)
    assert letter in allowed(compiler.matcher(regex_grammar("b*", "p")), compiler)


def test_special_tokens_are_named_in_lark_by_name_or_number() -> None:
    tokenizer, compiler = tokenizer_of("byte_level"), compiler_of("byte_level")
    start, call, end = (
        tokenizer.token_id(name) for name in ("<|im_start|>", "<tool_call>", "<|im_end|>")
    )
    text = f"""
        start: <|im_start|> <tool_call> body <[{end}]>
        body: %json {{"type": "object", "properties": {{"a": {{"type": "integer"}}}},
                      "required": ["a"], "additionalProperties": false}}
    """
    matcher = compiler.matcher(lark_grammar(text, "p"))
    assert None not in (start, call, end)
    assert allowed(matcher, compiler) == {start}
    assert matcher.consume_tokens([start])
    assert allowed(matcher, compiler) == {call}
    assert matcher.consume_tokens([call, *tokenizer.encode('{"a":12}')])
    assert allowed(matcher, compiler) == {end}
    assert matcher.consume_tokens([end])


def test_several_grammars_in_one_refer_to_one_another() -> None:
    parts = [
        {"lark_grammar": 'start: "x" @inner'},
        {"name": "inner", "lark_grammar": "start: /y+/"},
    ]
    compiler, tokenizer = compiler_of("bytes_only"), tokenizer_of("bytes_only")
    grammar = Grammar(GrammarKind.LARK, json.dumps({"grammars": parts}))
    compiler.check(grammar, "p")
    matcher = compiler.matcher(grammar)
    assert matcher.consume_tokens(tokenizer.encode("xyy"))
    assert matcher.is_accepting()


@pytest.mark.parametrize("kind", USABLE)
def test_a_model_that_prefers_white_space_ends_its_json(kind: str) -> None:
    tokenizer, compiler = tokenizer_of(kind), compiler_of(kind)
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object", **CLOSED}
    matcher = compiler.matcher(json_schema_grammar(schema, "p"))
    table = tokenizer.piece_table(compiler.vocab_size)
    assert table is not None
    text = b""
    while not matcher.is_stopped():
        ways = allowed(matcher, compiler) - set(ends_of(tokenizer))
        if not ways:
            break
        token_id = max(ways, key=lambda i: (table[i].isspace(), b"\n" in table[i], -len(table[i])))
        assert matcher.consume_token(token_id)
        text += table[token_id]
        assert len(text) < 400, text
    assert json.loads(text) == {"a": 1}
    assert len(text) > 100, "it had much of it"


@pytest.mark.parametrize("kind", USABLE)
def test_forced_text_with_a_special_tokens_name_in_it_stays_text(kind: str) -> None:
    tokenizer, compiler = tokenizer_of(kind), compiler_of(kind)
    grammar = json_schema_grammar({"const": "a <tool_call> and </s> <|im_end|>"}, "p")
    matcher = compiler.matcher(grammar)
    output: list[int] = []
    while (found := allowed(matcher, compiler)) != set(ends_of(tokenizer)):
        output.append(min(found))
        assert matcher.consume_tokens(output[-1:]), matcher.get_error()
    assert tokenizer.marker_ids.isdisjoint(output)
    assert json.loads(tokenizer.decode(output)) == "a <tool_call> and </s> <|im_end|>"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex_grammar("a(", "p"), "regex parse error"),
        (regex_grammar("(?=a)b", "p"), "look-around"),
        (lark_grammar("start: missing", "p"), "missing"),
        (lark_grammar("nonsense", "p"), "Expected"),
        (lark_grammar("start: <|no_such_token|>", "p"), "no_such_token"),
        (json_schema_grammar({"type": "nonsense"}, "p"), "Invalid type: nonsense"),
        (json_schema_grammar({"type": "number", "minimum": 3, "maximum": 2}, "p"), "minimum"),
        (json_schema_grammar({"$ref": "#/$defs/none"}, "p"), "does not exist"),
        (json_schema_grammar({"$ref": "https://example.com/x"}, "p"), "example.com"),
        (json_schema_grammar({"$ref": "#"}, "p"), "back to itself"),
        (json_schema_grammar({"oneOf": [{"minimum": 1}, {"minimum": 2}]}, "p"), "anyOf"),
        (json_schema_grammar({"type": "object", "required": ["a"], **CLOSED}, "p"), "'a'"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_compilers_reason(
    grammar: Grammar, words: str
) -> None:
    compiler = compiler_of("byte_level")
    for _ in range(2):
        with pytest.raises(InvalidParameter, match=words) as refused:
            compiler.check(grammar, "guided_regex")
        assert refused.value.param == "guided_regex"
        assert len(refused.value.message) <= 300
        assert "<non-verbose" not in refused.value.message


def _chain(length: int, depth: int) -> str:
    """Definitions that each lead to the next, from within lists of lists."""
    defs = {}
    for i in range(length):
        schema: dict[str, object] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            schema = {"items": schema}
        defs[f"d{i}"] = schema
    return json.dumps({"$ref": "#/$defs/d0", "$defs": defs | {f"d{length}": {}}})


HOSTILE = {
    "deep references": Grammar(GrammarKind.JSON_SCHEMA, _chain(900, 10)),
    "more references": Grammar(GrammarKind.JSON_SCHEMA, _chain(5000, 1)),
    "deep parentheses": Grammar(GrammarKind.LARK, f"start: {'(' * 10_000}{')' * 10_000}"),
    "deep regex": Grammar(GrammarKind.REGEX, "(" * 8000 + ")" * 8000),
    "chain of rules": Grammar(
        GrammarKind.LARK, "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000))
    ),
    "doubling terminals": Grammar(
        GrammarKind.LARK,
        "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"',
    ),
    "many schemas": Grammar(GrammarKind.LARK, "start: " + '%json {"type": "object"} ' * 9000),
}


@pytest.mark.promise(
    "Grammars: compiling any grammar is bounded work, and an admitted grammar runs (for grammars "
    "found to be slow, deep or wide; a highly ambiguous one can still exceed the limits of a run)"
)
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_grammar_is_an_error_and_no_crash(name: str) -> None:
    compiler = compiler_of("bytes_only")
    with pytest.raises(GrammarInvalid):  # a worker compiles what another release let pass
        compiler.compiled(HOSTILE[name]).result()
    with pytest.raises(InvalidParameter):
        compiler.check(HOSTILE[name], "p")


def test_a_compiled_grammar_is_kept_and_the_least_used_goes() -> None:
    compiler = compiler_of("bytes_only")
    first = json_object_grammar()
    kept = compiler.compiled(first)
    for i in range(MAX_KEPT - 1):
        compiler.compiled(regex_grammar(f"a{{{i + 1}}}", "p"))
    assert compiler.compiled(first) is kept
    compiler.compiled(regex_grammar("b", "p"))
    assert compiler.compiled(first) is kept
    for i in range(MAX_KEPT):
        compiler.compiled(regex_grammar(f"c{{{i + 1}}}", "p"))
    assert compiler.compiled(first) is not kept


def test_what_failed_is_not_kept() -> None:
    compiler, wrong = compiler_of("bytes_only"), regex_grammar("a(", "p")
    first = compiler.compiled(wrong)
    with pytest.raises(GrammarInvalid):
        first.result()
    deadline_s = time.monotonic() + 30
    while compiler.compiled(wrong) is first:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_many_threads_may_check_at_once() -> None:
    compiler = compiler_of("byte_level")
    wrong: list[BaseException] = []

    def check(number: int) -> None:
        try:
            for i in range(8):
                compiler.check(regex_grammar(f"[a-z]{{{1 + (number + i) % 5}}}", "p"), "p")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=check, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

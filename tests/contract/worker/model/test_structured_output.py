"""Outputs kept to grammars by a random model: valid whenever whole, the same whatever happens."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from shared.messages import ErrorCode, FinishReason, Grammar, GrammarKind, SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from shared.text.json_schema import FORMATS
from shared.text.tokenizer import FastTokenizer
from tests.support.checkpoints import IM_END, IM_START, make_checkpoint
from tests.support.engine_run import Generated, generate, new_engine
from tests.support.examples import examples
from tests.support.json_schemas import random_schema
from tests.support.torch_device import torch_device
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model
from worker.model.sampling import grammar_masks
from worker.model.sampling.grammar_masks import GrammarMasks

NUM_SCHEMAS = examples(100)
MAX_TOKENS = 300
# A small model of a larger vocabulary: what is tested is the masks.
TINY = {
    "vocab_size": 600,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
PERSON = json_schema_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "response_format",
)


@dataclass(frozen=True)
class Model:
    path: Path
    tokenizer: FastTokenizer

    def build(self, **options: object) -> BuiltModel:
        base = EngineOptions(
            checkpoint=str(self.path),
            device=torch_device().type,
            dtype="float32",
            cpu_tier="reference",
            num_kv_blocks=512,
            max_num_seqs=16,
            max_num_batched_tokens=256,
        )
        return build_model(replace(base, **options))  # type: ignore[arg-type]

    def text(self, generated: Generated) -> str:
        return self.tokenizer.decode(generated.token_ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), **TINY)  # type: ignore[arg-type]
    return Model(path, load_tokenizer(path))


@pytest.fixture(scope="module")
def engine(model: Model) -> Engine:
    return new_engine(model.build())


def kept(grammar: Grammar | None, seed: int = 0, **changes: object) -> SamplingParams:
    values = {"max_tokens": MAX_TOKENS, "seed": seed, "grammar": grammar, **changes}
    return SamplingParams(**values)  # type: ignore[arg-type]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(590) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def mixed_params(count: int) -> list[SamplingParams]:
    """Structured and free, greedy and drawn, side by side."""
    grammars = [
        PERSON,
        None,
        regex_grammar(r"[a-f]{3,9}-\d+", "guided_regex"),
        json_object_grammar(),
        None,
        lark_grammar('start: "say" (" " WORD){2,4}\nWORD: /[a-z]{1,8}/', "guided_grammar"),
    ]
    return [
        kept(
            grammars[i % len(grammars)],
            seed=i,
            max_tokens=40,
            temperature=0.0 if i % 5 == 0 else 1.0,
            top_p=0.9 if i % 4 == 0 else 1.0,
            repetition_penalty=1.3 if i % 3 == 0 else 1.0,
        )
        for i in range(count)
    ]


def outputs(results: Sequence[Generated]) -> list[tuple[list[int], FinishReason | None]]:
    assert all(result.error is None for result in results)
    return [(result.token_ids, result.finish_reason) for result in results]


@pytest.mark.promise(
    "Grammars: every complete output is valid against its schema (220 random schemas, formats "
    "checked)"
)
@pytest.mark.timeout(600)
def test_every_whole_output_is_valid_by_its_schema(model: Model, engine: Engine) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    params = [
        kept(json_schema_grammar(schema, "response_format"), seed)
        for seed, schema in enumerate(schemas)
    ]
    results = generate(engine, [[1, 2, 3]] * NUM_SCHEMAS, params)
    ends = Counter(result.finish_reason for result in results)
    assert set(ends) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert ends[FinishReason.STOP] > 0.8 * NUM_SCHEMAS
    check = Draft202012Validator.FORMAT_CHECKER
    assert check.checkers.keys() >= FORMATS
    for schema, result in zip(schemas, results, strict=True):
        if result.finish_reason is FinishReason.STOP:
            validator = Draft202012Validator(schema, format_checker=check)
            validator.validate(json.loads(model.text(result)))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_batch_says_what_each_says_alone(model: Model, lookahead: int) -> None:
    params = mixed_params(12)
    together = generate(new_engine(model.build(lookahead=lookahead)), prompts(12), params)
    alone = [
        generate(new_engine(model.build()), [prompt], each)[0]
        for prompt, each in zip(prompts(12), params, strict=True)
    ]
    assert outputs(together) == outputs(alone)


@pytest.mark.promise(
    "Grammars: the output is the same after preemption, in any batch, and continued by another "
    "worker after any token"
)
def test_preemption_changes_nothing(model: Model, engine: Engine) -> None:
    params = mixed_params(12)
    undisturbed = generate(engine, prompts(12), params)
    for lookahead in (0, 1):
        small = new_engine(model.build(num_kv_blocks=12, block_size=8, lookahead=lookahead))
        assert outputs(generate(small, prompts(12), params)) == outputs(undisturbed)
        assert small.stats().preemptions > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_neighbours_that_leave_and_prefixes_that_are_found_change_nothing(
    model: Model, engine: Engine, lookahead: int
) -> None:
    """Cancelled ones, half of them structured, go with a token in flight."""
    params = mixed_params(12)
    asked = [[*range(40, 60), *prompt] for prompt in prompts(12)]
    undisturbed = generate(engine, asked, params)
    cancelled = {i: 1 + i for i in (0, 1, 4, 6, 7, 9)}
    small = new_engine(
        model.build(num_kv_blocks=22, block_size=4, max_num_seqs=6, lookahead=lookahead)
    )
    disturbed = generate(small, asked, params, cancelled=cancelled)
    for i, (result, like) in enumerate(zip(disturbed, undisturbed, strict=True)):
        if i in cancelled and result.finish_reason is None:
            assert result.token_ids == like.token_ids[: cancelled[i]]
        else:
            assert outputs([result]) == outputs([like])
    stats = small.stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.preemptions > 0
    assert sum(result.finish_reason is None for result in disturbed) >= 4


@pytest.mark.parametrize(("lookahead", "most"), [(0, 64), (1, 65)])
def test_a_structured_stream_takes_a_step_for_each_token(
    model: Model, lookahead: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_masks, "STEP_WAIT_SECONDS", 60)  # no core may be free
    engine = new_engine(model.build(lookahead=lookahead))
    kept_to = kept(regex_grammar("[0-9]{600}", "guided_regex"), max_tokens=64)
    results = generate(engine, prompts(2), [kept_to, kept(None, max_tokens=64, ignore_eos=True)])
    assert [len(result.token_ids) for result in results] == [64, 64]
    assert engine.stats().step <= most


@pytest.mark.parametrize("lookahead", [0, 1])
def test_masks_that_come_late_change_no_output_and_hold_up_no_neighbour(
    model: Model, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = regex_grammar("[0-9]{600}", "guided_regex")
    params = [kept(slow, i, max_tokens=6) for i in range(8)]
    params += [kept(None, 8, max_tokens=40, ignore_eos=True), kept(PERSON, 9, max_tokens=40)]
    expected = generate(new_engine(model.build(lookahead=lookahead)), prompts(10), params)
    released = threading.Event()
    make = GrammarMasks._make

    def make_late(masks: GrammarMasks, state: Any, new: list[int]) -> None:
        if state.grammar == slow:
            released.wait()
        make(masks, state, new)

    monkeypatch.setattr(GrammarMasks, "_make", make_late)
    monkeypatch.setattr(grammar_masks, "STEP_WAIT_SECONDS", 0.0)
    engine = new_engine(model.build(lookahead=lookahead))
    for i, (prompt, each) in enumerate(zip(prompts(9), params[:9], strict=False)):
        engine.add(EngineRequest(request_id=str(i), prompt_token_ids=tuple(prompt), params=each))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(9)}

    def step() -> None:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids

    try:
        for _ in range(20):
            step()
        assert tokens["8"] == expected[8].token_ids[: 20 - lookahead]
        assert not any(tokens[str(i)] for i in range(8))
    finally:
        released.set()  # threads wait for it
    while engine.has_unfinished():
        step()
        engine.check_integrity()
    assert list(tokens.values()) == [each.token_ids for each in expected[:9]]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_slow_masks_have_a_thread_of_their_own_and_change_no_output(
    model: Model, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [kept(PERSON, i, max_tokens=40) for i in range(3)]
    expected = generate(new_engine(model.build(lookahead=lookahead)), prompts(3), params)
    threads: set[str] = set()
    make = GrammarMasks._make

    def make_noted(masks: GrammarMasks, state: Any, new: list[int]) -> None:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        make(masks, state, new)

    monkeypatch.setattr(GrammarMasks, "_make", make_noted)
    monkeypatch.setattr(grammar_masks, "SLOW_CPU_SECONDS", 0.0)  # all but a row's first mask
    results = generate(new_engine(model.build(lookahead=lookahead)), prompts(3), params)
    assert threads == {"masks", "slow-masks"}
    assert [each.token_ids for each in results] == [each.token_ids for each in expected]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_grammar_of_which_each_mask_takes_longer_ends_its_rows_and_no_other(
    model: Model, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission begins few outputs: what grows slow later is for the worker to find."""
    ambiguous = Grammar(GrammarKind.LARK, "start: s\ns: s s | /[a-z ]/\n")
    monkeypatch.setattr(grammar_masks, "FIRST_CPU_SECONDS", 0.02)  # this vocabulary is small
    monkeypatch.setattr(grammar_masks, "MASK_CPU_SECONDS", 0.0005)
    params = [kept(ambiguous, i, max_tokens=400, ignore_eos=True) for i in range(8)]
    params += [kept(None, 8, max_tokens=60, ignore_eos=True), kept(PERSON, 9)]
    engine = new_engine(model.build(lookahead=lookahead))
    alone = generate(engine, prompts(10)[8:], params[8:])
    results = generate(engine, prompts(10), params)
    assert outputs(results[8:]) == outputs(alone)
    for result in results[:8]:
        assert result.error is ErrorCode.GRAMMAR_FAILED
    engine.self_test()
    engine.check_integrity()


def test_an_output_goes_on_elsewhere_from_any_token(model: Model, engine: Engine) -> None:
    params = [replace(each, max_tokens=200) for each in mixed_params(6)]
    undisturbed = generate(engine, prompts(6), params)
    elsewhere = new_engine(model.build(lookahead=1))
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        report = [r.token_ids[: int(share * len(r.token_ids))] for r in undisturbed]
        rest = generate(elsewhere, prompts(6), params, resumed=report)
        whole = [(a + r.token_ids, r.finish_reason) for a, r in zip(report, rest, strict=True)]
        assert whole == outputs(undisturbed)


@pytest.mark.promise("Grammars: the output ends where its grammar does, with any other parameters")
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"ignore_eos": True},
        {"min_tokens": MAX_TOKENS},
        {"min_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0},
        {"logit_bias": dict.fromkeys(range(600), -100.0)},
        {"presence_penalty": 2.0, "repetition_penalty": 50.0},
        {"top_k": 1},
        {"top_p": 0.0, "min_p": 1.0},
    ],
)
def test_a_complete_output_ends_whatever_min_tokens_and_ignore_eos_request(
    model: Model, engine: Engine, changes: dict[str, object]
) -> None:
    (result,) = generate(
        engine, [[1]], kept(choice_grammar(["yes", "no"], "guided_choice"), **changes)
    )
    assert result.finish_reason is FinishReason.STOP
    assert model.text(result) in ("yes", "no")


def test_while_there_is_a_choice_ends_are_held_back(model: Model, engine: Engine) -> None:
    many = regex_grammar("a*", "guided_regex")
    params = [
        kept(many, max_tokens=30, ignore_eos=True),
        kept(many, max_tokens=30, min_tokens=20),
        kept(many, max_tokens=30, logit_bias={599: 100.0}),
    ]
    forced, least, first = generate(engine, [[1]] * 3, params)
    assert (len(forced.token_ids), forced.finish_reason) == (30, FinishReason.LENGTH)
    assert len(least.token_ids) >= 20
    assert (model.text(first), first.finish_reason) == ("", FinishReason.STOP)


def test_stop_token_ids_end_a_structured_output_too(model: Model, engine: Engine) -> None:
    digits = [model.tokenizer.token_id(digit) for digit in "0123456789"]
    params = kept(regex_grammar("[0-9]{200}", "guided_regex"), stop_token_ids=tuple(digits))
    (result,) = generate(engine, [[1]], params)
    assert result.finish_reason is FinishReason.STOP
    assert len(result.token_ids) == 1


def test_special_tokens_come_where_the_grammar_names_them_only(
    model: Model, engine: Engine
) -> None:
    call = lark_grammar(
        f'start: <{IM_START[1:-1]}> "call" %json {{"type": "integer", "maximum": 99, "minimum": 1}}'
        f" <[{model.tokenizer.token_id(IM_END)}]>",
        "guided_grammar",
    )
    text = json_schema_grammar({"const": f"not {IM_END} but its name"}, "response_format")
    called, output = generate(engine, [[1]] * 2, [kept(call), kept(text)])
    begin, end = (model.tokenizer.token_id(name) for name in (IM_START, IM_END))
    assert called.token_ids[0] == begin
    assert called.token_ids[-1] == end
    assert 1 <= int(model.text(called).removeprefix("call")) <= 99
    assert json.loads(model.text(output)) == f"not {IM_END} but its name"
    assert end not in output.token_ids[:-1]


def test_log_probabilities_are_those_of_what_the_grammar_leaves(
    model: Model, engine: Engine
) -> None:
    (result,) = generate(
        engine,
        [[1]],
        kept(regex_grammar("[01]{5}", "guided_regex"), logprobs=5, temperature=0.0),
    )
    *digits, end = result.logprobs
    for entry in digits:
        assert {model.tokenizer.token_text(i) for i, _ in entry.top} <= {"0", "1", "00", "01", "10"}
        assert entry.top[0][0] == entry.token_id
    assert {i for i, _ in end.top} == {597, 599}  # the model's two ends


def test_rows_beyond_the_tokenizers_vocabulary_are_never_drawn(
    model: Model, tmp_path: Path
) -> None:
    config = json.loads((model.path / "config.json").read_text())
    for file in model.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 643}))
    padded = new_engine(replace(model, path=tmp_path).build(load_format="dummy"))
    wanted = dict.fromkeys(range(600, 643), 100.0)
    params = kept(json_object_grammar(), max_tokens=30, logit_bias=wanted)
    free = kept(None, max_tokens=30, logit_bias=wanted)
    structured, loose = generate(padded, [[1]] * 2, [params, free])
    assert max(structured.token_ids) < 600
    assert max(loose.token_ids) >= 600


@pytest.mark.promise("Grammars: a grammar that cannot be enforced fails its own job")
def test_what_cannot_be_followed_fails_alone(model: Model, engine: Engine) -> None:
    """As when another release wrote the log, or let a grammar pass that this one refuses."""
    digits = regex_grammar("[0-9]{4}", "guided_regex")
    letter = model.tokenizer.token_id("a")
    assert letter is not None
    dead_end = Grammar(GrammarKind.LARK, 'start: "a" b\nb: b "c"')
    params = [
        kept(digits),
        kept(digits),
        kept(None, max_tokens=5),
        kept(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nonsense"}')),
        kept(dead_end),
    ]
    strayed, fine, free, unreadable, stuck = generate(
        engine, [[1]] * 5, params, resumed=[[letter], [], [], [], []]
    )
    assert [strayed.error, unreadable.error, stuck.error] == [ErrorCode.GRAMMAR_FAILED] * 3
    assert (fine.error, fine.finish_reason) == (None, FinishReason.STOP)
    assert len(free.token_ids) == 5


def test_a_model_without_an_end_keeps_to_no_grammar(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "endless", eos_token_id=None)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["eos_token"]  # an end as well
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    options = EngineOptions(checkpoint=str(path), device="cpu", num_kv_blocks=16)
    assert not build_model(options).engine_config.structured_output
    (path / "tokenizer.json").unlink()
    assert not build_model(options).engine_config.structured_output

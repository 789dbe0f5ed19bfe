"""vLLM with this project's sampler says what this project's engine says, token by token.

One start of vLLM for all of it, with few blocks and small steps, so that requests are preempted,
their prompts computed in chunks and their beginnings found in the prefix cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shared.messages import ErrorCode, FinishReason, SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar import json_schema_grammar, lark_grammar, regex_grammar
from tests.support.engine_run import Generated, generate, new_engine
from tests.support.tool_models import POISON, poisoned_demo
from tests.support.vllm_environment import vllm_python
from tests.support.vllm_runs import Answer, Run, VllmRequest, VllmWork
from worker.engine.engine import Engine
from worker.engine_options import EngineOptions
from worker.model.build import build_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]

NUM_TOKENS = 48
MAX_MODEL_LEN = 256
BROKEN = 1  # an output that begins with it follows no grammar of these tests

PERSON = json_schema_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "schema",
)
WORDS = lark_grammar('start: "say" (" " WORD){2,9}\nWORD: /[a-z]{1,8}/', "guided_grammar")
CODE = regex_grammar(r"[a-f]{3,9}-\d{2,30}", "guided_regex")
# As a request with tools has it: a marker, a call within, a marker.
TOOLS = lark_grammar(
    'start: /[^<]{0,20}/ "<call>" call "</call>"\n'
    'call: %json {"type": "object", "properties": {"name": {"const": "open_gate"},'
    ' "arguments": {"type": "object", "properties": {"gate": {"type": "integer"}},'
    ' "required": ["gate"], "additionalProperties": false}},'
    ' "required": ["name", "arguments"], "additionalProperties": false}',
    "tools",
)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, **values)


CASES: dict[str, SamplingParams] = {
    "greedy": params(temperature=0.0),
    "seeded": params(seed=11, ignore_eos=True),
    "cold": params(seed=-3, temperature=0.4),
    "top_k": params(seed=5, top_k=7),
    "top_p": params(seed=6, top_p=0.8, temperature=1.3),
    "min_p": params(seed=7, min_p=0.1, ignore_eos=True),
    "all filters": params(seed=8, top_k=20, top_p=0.9, min_p=0.02, temperature=0.9),
    "greedy, penalties": params(temperature=0.0, frequency_penalty=0.7),
    "penalties": params(
        seed=9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
    ),
    "bias": params(seed=10, logit_bias={17: 4.0, 300: -100.0, 2: 3.0}),
    "min_tokens": params(seed=12, min_tokens=30, logit_bias={2: 6.0}),
    "greedy, min_tokens": params(temperature=0.0, min_tokens=30, logit_bias={0: 5.0}),
    "stop token": params(seed=13, stop_token_ids=(17,), logit_bias={17: 3.0}),
    "ignore_eos": params(seed=14, ignore_eos=True, logit_bias={0: 4.0}),
    "logprobs": params(seed=15, logprobs=5, top_p=0.9),
    "greedy, logprobs": params(temperature=0.0, logprobs=0, ignore_eos=True),
    "all, logprobs": params(
        seed=16, logprobs=20, presence_penalty=0.5, logit_bias={5: 1.0}, min_tokens=4
    ),
    "schema": params(seed=17, grammar=PERSON),
    "greedy, schema": params(temperature=0.0, grammar=PERSON),
    "schema, logprobs": params(seed=18, grammar=PERSON, logprobs=8, frequency_penalty=0.1),
    "regex": params(seed=19, grammar=CODE),
    "lark": params(seed=20, grammar=WORDS, min_tokens=20),
    "tools": params(seed=21, grammar=TOOLS, ignore_eos=True),
}
NAMES = [*CASES]


@dataclass(frozen=True)
class Outcome:
    """Of both engines."""

    alone: dict[str, Run]
    mixed: Run
    resumed: Run
    repeated: Run
    failing: Run
    expected: dict[str, Generated]
    prompts: dict[str, tuple[int, ...]]
    engine: Engine


def prompts_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns a prompt for each case; the longest take several steps, half share a beginning."""
    tokenizer = load_tokenizer(path)
    shared = tuple(tokenizer.encode("The keeper of the gate writes into his book. " * 8))[:72]
    rng = random.Random(3)
    found = {}
    for i, name in enumerate(NAMES):
        own = tuple(rng.randrange(3, 4000) for _ in range(rng.randint(4, 30)))
        found[name] = (*shared, *own) if i % 2 else own
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("vllm")
    path = poisoned_demo(folder)
    options = EngineOptions(
        checkpoint=str(path),
        device="cpu",
        dtype="float32",
        cpu_tier="reference",
        max_model_len=MAX_MODEL_LEN,
        block_size=32,
        num_kv_blocks=40,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        step_target_ms=None,
    )
    engine = new_engine(build_model(replace(options, num_kv_blocks=400)))
    prompts = prompts_of(path)
    expected = dict(
        zip(
            NAMES,
            generate(engine, [prompts[n] for n in NAMES], [CASES[n] for n in NAMES]),
            strict=True,
        )
    )

    def request(name: str, suffix: str = "", resumed: tuple[int, ...] = ()) -> VllmRequest:
        return VllmRequest(f"{name}{suffix}", prompts[name], CASES[name], resumed)

    work = VllmWork(replace(options, engine="vllm"))
    alone = {name: work.add([request(name)]) for name in NAMES}
    mixed = work.add([request(n) for n in NAMES] + [request(n, " again") for n in NAMES[:9]])
    resumed = work.add(
        [
            request(name, f" from {at}", tuple(expected[name].token_ids[:at]))
            for name in NAMES
            for at in range(10, len(expected[name].token_ids), 10)
        ]
    )
    repeated = work.add([request("seeded", f" {i}") for i in range(3)])
    poisoned = VllmRequest("poisoned", (5, POISON, 7), CASES["seeded"])
    plain = VllmRequest("poisoned, plain", (5, POISON, 7), CASES["greedy"])
    broken = request("schema", " broken", (BROKEN,))
    failing = work.add([poisoned, request("top_p"), plain, broken, request("schema")])
    results = work.results(folder)
    return Outcome(
        {name: results[at] for name, at in alone.items()},
        results[mixed],
        results[resumed],
        results[repeated],
        results[failing],
        expected,
        prompts,
        engine,
    )


def assert_same(answer: Answer, expected: Generated, begin: int = 0) -> None:
    assert answer.error is None, answer.message
    assert answer.token_ids == expected.token_ids[begin:]
    assert answer.finish_reason is expected.finish_reason
    assert len(answer.logprobs) == len(expected.logprobs[begin:])
    for own, theirs in zip(expected.logprobs[begin:], answer.logprobs, strict=True):
        assert theirs.token_id == own.token_id
        assert theirs.logprob == pytest.approx(own.logprob, abs=1e-4)
        values = [value for _, value in own.top]
        assert [value for _, value in theirs.top] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_alone(outcome: Outcome, name: str) -> None:
    assert_same(outcome.alone[name].answers[name], outcome.expected[name])


@pytest.mark.parametrize("name", NAMES)
def test_among_others_and_preempted(outcome: Outcome, name: str) -> None:
    assert outcome.mixed.preemptions > 0
    assert_same(outcome.mixed.answers[name], outcome.expected[name])


@pytest.mark.parametrize("name", NAMES)
def test_resumed_at_every_tenth_token(outcome: Outcome, name: str) -> None:
    expected = outcome.expected[name]
    for at in range(10, len(expected.token_ids), 10):
        assert_same(outcome.resumed.answers[f"{name} from {at}"], expected, at)


def test_the_cases_are_what_they_seem(outcome: Outcome) -> None:
    """An output that ends at once, or is empty, would show little."""
    lengths = {name: len(each.token_ids) for name, each in outcome.expected.items()}
    assert min(lengths.values()) > 10, lengths
    outputs = {tuple(each.token_ids) for each in outcome.expected.values()}
    assert len(outputs) == len(NAMES)
    assert max(map(len, outcome.prompts.values())) > 64, "no prompt takes several steps"


def test_prefix_hits_change_nothing(outcome: Outcome) -> None:
    answer = outcome.repeated.answers.values()
    assert all(each.token_ids == outcome.expected["seeded"].token_ids for each in answer)
    assert any(run.answers[name].num_cached_tokens >= 64 for name, run in outcome.alone.items())


def test_a_row_that_is_not_finite_fails_alone(outcome: Outcome) -> None:
    for name in ("poisoned", "poisoned, plain"):
        answer = outcome.failing.answers[name]
        assert (answer.error, answer.finish_reason) == (
            ErrorCode.NONFINITE_LOGITS,
            FinishReason.ERROR,
        )
        assert answer.token_ids == []
    assert_same(outcome.failing.answers["top_p"], outcome.expected["top_p"])


def test_a_grammar_that_fails_ends_its_request_as_ours_does(outcome: Outcome) -> None:
    answer = outcome.failing.answers["schema broken"]
    prompt = outcome.prompts["schema"]
    own = generate(outcome.engine, [prompt], CASES["schema"], "broken", resumed=[(BROKEN,)])
    assert own[0].error is answer.error is ErrorCode.GRAMMAR_FAILED
    assert answer.token_ids == []
    assert_same(outcome.failing.answers["schema"], outcome.expected["schema"])

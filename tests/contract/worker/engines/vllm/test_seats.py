"""Seats inside ENGINE=vllm are shared among tenants, then among jobs, and outputs stay the same.

Who gives a seat up leaves vLLM and returns. Each start of vLLM here has four seats.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.messages import FinishReason, SamplingParams
from shared.text.grammar import json_schema_grammar, regex_grammar
from tests.support.tool_models import DEMO_CHECKPOINT
from tests.support.vllm_environment import vllm_python
from tests.support.vllm_runs import Answer, Run, VllmRequest, VllmWork
from worker.engine_options import EngineOptions

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]

SEATS = 4
HANDFUL = 8  # steps: one moves a seat, one is late, some compute the prompts of others
OPTIONS = EngineOptions(
    checkpoint=str(DEMO_CHECKPOINT),
    device="cpu",
    dtype="float32",
    engine="vllm",
    vllm_args='{"enforce_eager": true}',
    max_model_len=256,
    block_size=32,
    num_kv_blocks=100,
    max_num_seqs=SEATS,
    max_num_batched_tokens=64,
    step_target_ms=None,
)
PERSON = json_schema_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 9},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    "schema",
)
CODE = regex_grammar(r"[a-f]{9,20}-\d{20,30}", "guided_regex")


def params(num_tokens: int = 60, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, **values)


# Of one job, as different as choices can be.
CHOICES: dict[str, SamplingParams] = {
    "greedy": params(temperature=0.0, ignore_eos=True),
    "seeded": params(seed=11, ignore_eos=True),
    "filtered": params(seed=8, top_k=20, top_p=0.9, min_p=0.02, ignore_eos=True),
    "penalised": params(
        seed=9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
    ),
    "greedy, penalised": params(temperature=0.0, frequency_penalty=0.7),
    "biased": params(seed=10, logit_bias={17: 4.0, 300: -100.0, 2: 3.0}, ignore_eos=True),
    "min_tokens": params(seed=12, min_tokens=50, logit_bias={2: 6.0}),
    "stop token": params(seed=13, stop_token_ids=(17,), logit_bias={17: 2.0}),
    "logprobs": params(seed=15, logprobs=5, top_p=0.9),
    "greedy, logprobs": params(temperature=0.0, logprobs=0, ignore_eos=True),
    "schema": params(seed=17, grammar=PERSON),
    "schema, logprobs": params(seed=18, grammar=PERSON, logprobs=3, frequency_penalty=0.1),
    "regex": params(seed=19, grammar=CODE),
    "scored": params(seed=20, prompt_logprobs=2),
    "scored, no output": params(0, prompt_logprobs=0, temperature=0.0),
    "no output": params(0, temperature=0.0),
}
SHORT = params(3, temperature=0.0, ignore_eos=True)
VISITS = {"c": range(2, 240, 6), "d": range(5, 240, 9)}


def prompt_of(name: str) -> tuple[int, ...]:
    rng = random.Random(name)
    return tuple(rng.randrange(3, 4000) for _ in range(rng.randint(40, 100)))


def varied(tenant: str) -> list[VllmRequest]:
    """A job of all kinds of choices."""
    return [
        VllmRequest(f"{tenant} {name}", prompt_of(name), CHOICES[name], tenant=tenant, job_id="one")
        for name in CHOICES
    ]


def wide(tenant: str, job_id: str, count: int, num_tokens: int = 60, **more: Any) -> list[Any]:
    """A job of equal choices."""
    long = params(num_tokens, temperature=0.0, ignore_eos=True)
    name, prompt = f"{tenant} {job_id}", prompt_of(tenant)[:40]
    return [
        VllmRequest(f"{name} {i}", prompt, long, tenant=tenant, job_id=job_id, **more)
        for i in range(count)
    ]


def visits(tenant: str, steps: Iterable[int]) -> list[VllmRequest]:
    """Short jobs that come one after the other."""
    return [
        VllmRequest(f"{tenant} at {at}", (5, 6, 7, at + 8), SHORT, tenant=tenant, step=at)
        for at in steps
    ]


def of_tenant(run: Run, tenant: str) -> list[Answer]:
    return [answer for name, answer in run.answers.items() if name.startswith(tenant)]


def first_steps(answers: Iterable[Answer]) -> list[int]:
    assert all(answer.first_step is not None for answer in answers)
    return sorted(answer.first_step for answer in answers)  # type: ignore[type-var]


RUNS: dict[str, list[VllmRequest]] = {
    "alone": varied("a"),
    # Of another tenant, so that no prefix is found: its outputs are the same.
    "visited": [*varied("b"), *(each for t in VISITS for each in visits(t, VISITS[t]))],
    "jobs": [*wide("a", "one", 16), *wide("a", "two", 2, step=20)],
    "classes": [*wide("a", "one", 8), *wide("b", "later", 1, step=9, priority=1)],
    "cancelled": [
        # b takes the seat of 3, and c that of 2: both are held when they are cancelled.
        *(
            msgspec.structs.replace(each, cancelled=13 if i in (2, 3, 6) else -1)
            for i, each in enumerate(wide("a", "one", 8))
        ),
        *wide("b", "one", 1, step=10),
        *wide("c", "one", 1, step=11),
    ],
    "singles": [each for i in range(8) for each in wide("a", f"job {i}", 1, step=3 * i)],
}


def run_all(folder: Path, work: VllmWork, runs: dict[str, list[VllmRequest]]) -> dict[str, Run]:
    for requests in runs.values():
        work.add(requests)
    return dict(zip(runs, work.results(folder), strict=True))


@pytest.fixture(scope="module", params=[False, True], ids=["", "late"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Late: vLLM has drawn a token more for each request that leaves."""
    work = VllmWork(OPTIONS, is_late=request.param)
    return run_all(tmp_path_factory.mktemp("seats"), work, RUNS)


def test_tenants_that_come_get_their_first_token_at_once(found: dict[str, Run]) -> None:
    visited = found["visited"]
    for tenant, steps in VISITS.items():
        for at in steps:
            answer = visited.answers[f"{tenant} at {at}"]
            assert answer.first_step is not None
            assert answer.first_step - at < HANDFUL, at
    assert visited.preemptions - found["alone"].preemptions > 20


@pytest.mark.parametrize("name", CHOICES)
def test_who_gave_seats_up_says_what_it_says_alone(found: dict[str, Run], name: str) -> None:
    alone, visited = found["alone"].answers[f"a {name}"], found["visited"].answers[f"b {name}"]
    assert visited.error is None, visited.message
    assert (visited.token_ids, visited.finish_reason) == (alone.token_ids, alone.finish_reason)
    assert len(visited.logprobs) == len(alone.logprobs)
    for here, there in zip(visited.logprobs, alone.logprobs, strict=True):
        assert (here.token_id, here.logprob) == (
            there.token_id,
            pytest.approx(there.logprob, abs=1e-4),
        )
    assert len(visited.prompt_logprobs) == len(alone.prompt_logprobs), "scored once"
    for one, other in zip(visited.prompt_logprobs, alone.prompt_logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_the_choices_are_what_they_seem(found: dict[str, Run]) -> None:
    """An output that ends at once, or is empty, would show little."""
    answers = found["alone"].answers
    lengths = {n: len(answers[f"a {n}"].token_ids) for n in CHOICES if CHOICES[n].max_tokens}
    assert min(lengths.values()) > 10, lengths
    assert len(answers["a scored"].prompt_logprobs) == len(prompt_of("scored")) - 1


def test_what_returns_is_counted_once(found: dict[str, Run]) -> None:
    """In the prompt tokens of the engine, and as cached of none."""
    for name in ("alone", "visited"):
        run, requests = found[name], RUNS[name]
        assert run.prompt_tokens == sum(len(each.prompt) for each in requests)
        generated = sum(len(answer.token_ids) for answer in run.answers.values())
        unseen = sum(not each.params.max_tokens for each in requests)
        assert generated <= run.generated_tokens <= generated + unseen
        assert {answer.num_cached_tokens for answer in of_tenant(run, "ab"[name == "visited"])} == {
            0
        }


def test_a_single_tenant_is_never_preempted_for_shares(found: dict[str, Run]) -> None:
    assert found["alone"].preemptions == 0
    assert found["singles"].preemptions == found["cancelled"].preemptions


def test_a_second_job_of_a_tenant_gets_seats_at_once(found: dict[str, Run]) -> None:
    jobs = found["jobs"]
    assert max(first_steps(of_tenant(jobs, "a two"))) < 20 + 2 * HANDFUL
    assert jobs.preemptions - found["visited"].preemptions == SEATS // 2


def test_a_larger_priority_takes_no_seat(found: dict[str, Run]) -> None:
    """The number is larger, the request less urgent."""
    classes = found["classes"]
    assert first_steps(of_tenant(classes, "b"))[0] >= 60
    assert classes.preemptions == found["jobs"].preemptions


def test_a_cancelled_request_that_is_held_is_gone(found: dict[str, Run]) -> None:
    answers = found["cancelled"].answers
    assert found["cancelled"].preemptions - found["classes"].preemptions == 2
    assert answers["a one 6"].token_ids == []
    for i in (2, 3):
        assert 0 < len(answers[f"a one {i}"].token_ids) < 13
        assert answers[f"a one {i}"].finish_reason is None
    for i in (0, 1, 4, 5, 7):
        assert answers[f"a one {i}"].finish_reason is FinishReason.LENGTH
    assert len(answers["b one 0"].token_ids) == len(answers["c one 0"].token_ids) == 60


def test_who_fills_the_blocks_gives_them_to_who_comes(tmp_path: Path) -> None:
    """Two of 200 tokens fit, and four of 96. vLLM by itself preempts the last that came."""
    long = params(160, temperature=0.0, ignore_eos=True)
    first = [VllmRequest(f"a {i}", prompt_of(f"{i}")[:40], long, tenant="a") for i in range(4)]
    late = VllmRequest("b", prompt_of("b")[:40], long, tenant="b", step=50)
    options = replace(OPTIONS, num_kv_blocks=14)
    run = run_all(tmp_path, VllmWork(options), {"full": [*first, late]})["full"]
    came = run.answers["b"]
    assert came.first_step is not None
    assert came.last_step is not None
    assert came.first_step - 50 < HANDFUL
    assert came.last_step - 50 < 160 + 4 * HANDFUL, "it did not wait for the others"
    for answer in run.answers.values():
        assert (len(answer.token_ids), answer.finish_reason) == (160, FinishReason.LENGTH)


def test_with_vllms_sampler_no_seat_is_taken_and_the_next_one_is_shared(tmp_path: Path) -> None:
    options = replace(OPTIONS, vllm_sampler="vllm")
    requests = [*wide("a", "one", 16, 20), *wide("b", "one", 1, 20, step=5)]
    run = run_all(tmp_path, VllmWork(options), {"shared": requests})["shared"]
    assert run.preemptions == 0
    (late,) = of_tenant(run, "b")
    assert late.first_step is not None
    assert 15 < late.first_step < 20 + HANDFUL, "the first seat that is free is its own"
    assert {len(answer.token_ids) for answer in run.answers.values()} == {20}

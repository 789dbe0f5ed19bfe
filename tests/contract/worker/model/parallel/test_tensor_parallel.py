"""Two and four ranks, real processes, give what one gives: all ways to sample, cut and disturb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.support.engine_run import generate, new_engine
from tests.support.ranks import WAYS, assert_same, built, outputs, prompts
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.model.build import BuiltModel
from worker.settings import DEMO_CHECKPOINT

pytestmark = pytest.mark.timeout(300)


def disturbed(engine: Engine, asked: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Adds requests over time and cancels every third of them after a few steps; returns the
    tokens of the others."""
    tokens: dict[str, list[int]] = {}
    steps = 0
    waiting = list(enumerate(asked))
    while waiting or engine.has_unfinished():
        steps += 1
        if waiting and steps % 2:
            number, prompt = waiting.pop(0)
            tokens[f"r{number}"] = []
            engine.add(
                EngineRequest(
                    request_id=f"r{number}",
                    prompt_token_ids=tuple(prompt),
                    params=WAYS[number % len(WAYS)],
                )
            )
            if number >= 2 and number % 3 == 2:
                engine.cancel(f"r{number - 1}")
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    return {name: ids for name, ids in tokens.items() if int(name[1:]) % 3 != 1}


@dataclass(frozen=True)
class Served:
    """A model and the one engine that its runner serves."""

    model: BuiltModel
    engine: Engine


@contextmanager
def served(size: int) -> Iterator[Served]:
    with built(DEMO_CHECKPOINT, size) as model:
        yield Served(model, new_engine(model))


@pytest.fixture(scope="module")
def alone() -> Iterator[Served]:
    with served(1) as one:
        yield one


@pytest.fixture(scope="module")
def pair() -> Iterator[Served]:
    with served(2) as two:
        yield two


@pytest.mark.promise("Engine: tensor parallel (on CPUs; NCCL was never run)")
def test_every_way_to_sample_with_chunks_hits_and_preemptions(alone: Served, pair: Served) -> None:
    asked = prompts(15)
    expected = outputs(alone.engine, asked, WAYS, "cold")
    for label in ("cold", "warm"):
        assert_same(outputs(pair.engine, asked, WAYS, label), expected)
    stats = pair.engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.failed_steps == 0
    assert all(result.error is None for result in expected)


def test_cancels_in_between_change_no_other_output(alone: Served, pair: Served) -> None:
    asked = prompts(18, seed=2)
    expected = disturbed(alone.engine, asked)
    assert disturbed(pair.engine, asked) == expected
    assert sum(map(len, expected.values())) > 100


def test_a_resumed_output_goes_on_as_it_was(alone: Served, pair: Served) -> None:
    asked = prompts(5, seed=3)
    whole = outputs(alone.engine, asked, WAYS, "whole")
    heads = [result.token_ids[:3] for result in whole]
    rest = generate(pair.engine, asked, WAYS, "rest", resumed=heads)
    assert [head + result.token_ids for head, result in zip(heads, rest, strict=True)] == [
        result.token_ids for result in whole
    ]


def test_what_it_reports_is_the_whole_models(alone: Served, pair: Served) -> None:
    assert pair.model.num_parameters == alone.model.num_parameters
    assert pair.model.engine_config == alone.model.engine_config
    assert pair.model.engine_config.capacity_tokens == 144

"""Models over one rank and over several, and requests that use every way to sample."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shared.messages import SamplingParams
from shared.text.grammar import json_schema_grammar
from tests.support.engine_run import Generated, generate
from worker.engine.engine import Engine
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)
OBJECT = json_schema_grammar(
    {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    },
    "response_format",
)
WAYS = (
    GREEDY,
    SEEDED,
    replace(SEEDED, seed=8, frequency_penalty=1.5, logit_bias={20: 4.0}, min_tokens=4),
    replace(GREEDY, logprobs=3, prompt_logprobs=2),
    replace(SEEDED, seed=9, grammar=OBJECT, ignore_eos=False, max_tokens=40),
)


def prompts(count: int, vocab_size: int = 290, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab_size) for _ in range(20)]
    own = [
        [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 40))] for _ in range(count)
    ]
    return [shared + tail if i % 3 == 0 else tail for i, tail in enumerate(own)]


def engine_options(path: Path, size: int, **options: object) -> EngineOptions:
    """Of a pool so small that requests are preempted."""
    base = EngineOptions(
        checkpoint=str(path),
        device="cpu",
        dtype="float32",
        num_threads=size,
        block_size=4,
        num_kv_blocks=36,
        max_num_batched_tokens=16,
        tensor_parallel_size=size,
    )
    return replace(base, **options)  # type: ignore[arg-type]


@contextmanager
def built(path: Path, size: int, **options: object) -> Iterator[BuiltModel]:
    model = build_model(engine_options(path, size, **options))
    try:
        yield model
    finally:
        model.close()


def outputs(
    engine: Engine, asked: Sequence[Sequence[int]], ways: Sequence[SamplingParams], label: str
) -> list[Generated]:
    """What the engine gives for the prompts, each sampled in the next of the `ways`."""
    each = [ways[i % len(ways)] for i in range(len(asked))]
    return generate(engine, asked, each, label)


def assert_same(results: list[Generated], expected: list[Generated]) -> None:
    for result, like in zip(results, expected, strict=True):
        assert result.token_ids == like.token_ids
        assert (result.finish_reason, result.error) == (like.finish_reason, like.error)
        for mine, other in zip(result.logprobs, like.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)
        for score, other_score in zip(result.prompt_logprobs, like.prompt_logprobs, strict=True):
            assert score.logprob == pytest.approx(other_score.logprob, abs=1e-3)
            assert score.rank == other_score.rank

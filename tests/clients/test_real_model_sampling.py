"""SmolLM2's tokens are drawn as transformers' logits and warpers say. Seeds, choices and stops
decide the rest.

The draws of the distributions are all of one token after the same text, with one seed each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shared.messages import FinishReason, SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from tests.support.engine_run import generate, new_engine
from tests.support.greedy_reference import float32_model
from tests.support.real_model import real_checkpoint
from worker.engine.engine import Engine
from worker.engine_options import EngineOptions
from worker.job_runner import choice_seed
from worker.llm import LLM
from worker.model.build import build_model

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]

NUM_DRAWS = 512
LEAST_EXPECTED = 5  # draws of a token that is compared by itself
BLOCK_SIZE = 16
PROMPT = (
    "Fruits and colours: red apples, green pears, yellow bananas, red cherries, blue plums, green "
    "grapes. My favourite fruits are"
)
OUTPUT = " red apples, green pears, red apples, green pears, red apples and"  # before the draws
GREEN, RED, PURPLE, END = 2654, 2382, 14230, 2  # tokens
STORY = "Once upon a time there was a girl who lived by the sea."


@dataclass(frozen=True)
class Drawn:
    """SmolLM2 in float32 on the engine, and the logits of transformers after `prompt + output`."""

    engine: Engine
    llm: LLM
    prompt: list[int]
    output: list[int]
    logits: torch.Tensor  # [1, vocab]

    def counts(self, label: str, members: dict[str, Any]) -> np.ndarray:
        """[vocab]: how often each token came in NUM_DRAWS draws."""
        params = [
            SamplingParams(max_tokens=len(self.output) + 1, seed=seed, **members)
            for seed in range(NUM_DRAWS)
        ]
        drawn: Counter[int] = Counter()
        for result in generate(
            self.engine,
            [self.prompt] * NUM_DRAWS,
            params,
            f"{label} ",
            resumed=[self.output] * NUM_DRAWS,
        ):
            (token_id,) = result.token_ids
            drawn[token_id] += 1
        return np.array([drawn[token_id] for token_id in range(self.logits.shape[1])])

    def distribution(self, processors: list[LogitsProcessor]) -> np.ndarray:
        """[vocab] float64: the softmax of the logits after `processors`, one after the other."""
        ids = torch.tensor([self.prompt + self.output])
        scores = self.logits.clone()
        for processor in processors:
            scores = processor(ids, scores)
        found: np.ndarray = scores[0].double().softmax(dim=-1).numpy()
        return found


class OutputPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, which transformers lacks."""

    def __init__(self, output: list[int], presence: float, frequency: float) -> None:
        self._output, self._presence, self._frequency = output, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token_id, count in Counter(self._output).items():
            scores[0, token_id] -= self._presence + count * self._frequency
        return scores


@pytest.fixture(scope="module")
def drawn() -> Iterator[Drawn]:
    directory = real_checkpoint()
    options = EngineOptions(
        checkpoint=str(directory),
        dtype="float32",
        device="cpu",
        max_model_len=512,
        max_num_seqs=128,
        block_size=BLOCK_SIZE,
        num_kv_blocks=512,
    )
    built = build_model(options)
    tokenizer = load_tokenizer(directory)
    prompt, output = tokenizer.encode(PROMPT), tokenizer.encode(OUTPUT)
    # Whole blocks and a token: each draw computes that one alone.
    prompt = prompt[(len(prompt) + len(output) - 1) % BLOCK_SIZE :]
    with torch.inference_mode():
        logits = float32_model(directory)(torch.tensor([prompt + output])).logits[:, -1].clone()
    engine = new_engine(built)
    generate(engine, [prompt + output], SamplingParams(max_tokens=1, seed=0))  # fills the cache
    yield Drawn(engine, LLM.from_parts(engine, tokenizer), prompt, output, logits)
    built.close()


WARPED: dict[str, tuple[dict[str, Any], list[LogitsProcessor]]] = {
    "temperature": ({"temperature": 1.3}, [TemperatureLogitsWarper(1.3)]),
    "top_k": (
        {"temperature": 1.5, "top_k": 12},
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(12)],
    ),
    "top_p": (
        {"temperature": 1.5, "top_p": 0.25},
        [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.25)],
    ),
    "min_p": (
        {"temperature": 1.5, "min_p": 0.05},
        [TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.05)],
    ),
    "min_p, top_k and top_p": (
        {"temperature": 1.5, "min_p": 0.04, "top_k": 15, "top_p": 0.85},
        [
            TemperatureLogitsWarper(1.5),
            MinPLogitsWarper(0.04),
            TopKLogitsWarper(15),
            TopPLogitsWarper(0.85),
        ],
    ),
    "repetition_penalty": (
        {"repetition_penalty": 1.2, "top_k": 12},
        [RepetitionPenaltyLogitsProcessor(1.2), TopKLogitsWarper(12)],
    ),
    "logit_bias": (
        {"logit_bias": {GREEN: -100.0, PURPLE: 2.5, RED: -1.0}, "top_k": 12},
        [
            SequenceBiasLogitsProcessor([[[GREEN], -100.0], [[PURPLE], 2.5], [[RED], -1.0]]),
            TopKLogitsWarper(12),
        ],
    ),
    "a bias for the end": (
        {"logit_bias": {END: 19.0}, "top_k": 12},
        [SequenceBiasLogitsProcessor([[[END], 19.0]]), TopKLogitsWarper(12)],
    ),
}


def check_draws(counts: np.ndarray, distribution: np.ndarray) -> None:
    """Raises AssertionError where draws come from outside of the distribution, where it has few
    tokens and one never came, or where Pearson's chi-square is 4 deviations above its mean."""
    assert counts.sum() == NUM_DRAWS
    assert not counts[distribution == 0].any()
    expected = distribution * NUM_DRAWS
    is_compared = expected >= LEAST_EXPECTED
    if is_compared.sum() == (distribution > 0).sum():
        assert counts[is_compared].all()
    seen = np.append(counts[is_compared], counts[~is_compared].sum())
    right = np.append(expected[is_compared], expected[~is_compared].sum())
    seen, right = seen[right > 0], right[right > 0]
    freedom = len(seen) - 1
    assert freedom >= 5
    assert ((seen - right) ** 2 / right).sum() <= freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("name", WARPED)
def test_draws_have_the_distribution_of_the_warpers(drawn: Drawn, name: str) -> None:
    members, processors = WARPED[name]
    distribution = drawn.distribution(processors)
    if name != "temperature":  # every token that is left comes
        assert min(distribution[distribution > 0]) * NUM_DRAWS >= LEAST_EXPECTED
    check_draws(drawn.counts(name, members), distribution)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.6), (-0.5, -0.2)])
def test_draws_have_the_distribution_of_the_penalties(
    drawn: Drawn, presence: float, frequency: float
) -> None:
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
    processors = [OutputPenalties(drawn.output, presence, frequency), TopKLogitsWarper(12)]
    counts = drawn.counts(f"penalties {presence} {frequency}", {**penalties, "top_k": 12})
    check_draws(counts, drawn.distribution(processors))


def test_draws_before_min_tokens_have_the_distribution_without_the_end(drawn: Drawn) -> None:
    members = {"logit_bias": {END: 19.0}, "top_k": 12, "min_tokens": len(drawn.output) + 1}
    processors = [SuppressTokensLogitsProcessor([END], "cpu"), TopKLogitsWarper(12)]
    check_draws(drawn.counts("min_tokens", members), drawn.distribution(processors))


def test_a_seed_decides_the_tokens_whatever_runs_beside_it(drawn: Drawn) -> None:
    params = [SamplingParams(seed=seed, max_tokens=20) for seed in (5, 6, 5, 7)]
    beside = drawn.llm.generate([STORY] * len(params), params, progress=False)
    alone = [drawn.llm.generate([STORY], one, progress=False)[0] for one in params]
    assert [r.token_ids for r in beside] == [r.token_ids for r in alone]
    assert beside[0] != beside[1]
    assert len({result.token_ids for result in beside}) == 3


def test_choices_are_the_runs_of_their_seeds(drawn: Drawn) -> None:
    params = SamplingParams(seed=11, max_tokens=20, top_p=0.95)
    choices = drawn.llm.generate([STORY], params, progress=False, n=4)
    seeds = [choice_seed(11, choice) for choice in range(4)]
    alone = [
        drawn.llm.generate([STORY], replace(params, seed=seed), progress=False)[0] for seed in seeds
    ]
    assert [r.token_ids for r in choices] == [r.token_ids for r in alone]
    assert len({result.text for result in choices}) == 4


def test_stop_strings_and_stop_tokens_cut_the_text_where_they_first_come(drawn: Drawn) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    (whole,) = drawn.llm.generate([STORY], params, progress=False)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 9]  # neither begins nor ends with a token, as a rule
    (cut,) = drawn.llm.generate([STORY], replace(params, stop=("@@", stop)), progress=False)
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    token_id = whole.token_ids[25]
    end = whole.token_ids.index(token_id) + 1
    (cut,) = drawn.llm.generate(
        [STORY], replace(params, stop_token_ids=(token_id,)), progress=False
    )
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, token_id)
    assert cut.token_ids == whole.token_ids[:end]
    assert whole.text.startswith(cut.text)

"""SmolLM2 continues sixty prompts as transformers does: together, alone, from cached prefixes, and
in a KV cache that is too small for them.

Everything is in float32. The tokens are judged by transformers' logits after the same tokens. Where
its two best logits are closer than NEAR_TIE, rounding decides: a token that close to the best is
right too, and MAX_TIES bounds their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shared.messages import FinishReason, SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from tests.support.greedy_reference import float32_model, greedy_gaps
from tests.support.real_model import real_checkpoint
from tests.support.varied_prompts import VARIED_PROMPTS
from worker.engine.engine import Engine
from worker.engine.request import EngineStats
from worker.engine_options import EngineOptions
from worker.llm import LLM, OfflineResult
from worker.model.build import build_model

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
TOGETHER = 20  # sequences of a step
BLOCK_SIZE = 8
NUM_BLOCKS = 1024  # for all prompts and their outputs
FEW_BLOCKS = 96  # for the longest prompt and its output, and not for TOGETHER short ones
NEAR_TIE = 1e-3  # of logits up to 30
MAX_TIES = 3  # of about 1,400 tokens


@dataclass(frozen=True)
class Program:
    """An engine over SmolLM2 in float32."""

    engine: Engine
    llm: LLM

    def generate(self, prompts: Sequence[str]) -> list[OfflineResult]:
        return self.llm.generate(prompts, GREEDY, progress=False)

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()


@contextmanager
def program(num_kv_blocks: int) -> Iterator[Program]:
    options = EngineOptions(
        checkpoint=str(real_checkpoint()),
        dtype="float32",
        device="cpu",
        max_model_len=(FEW_BLOCKS - 1) * BLOCK_SIZE,
        max_num_seqs=TOGETHER,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_kv_blocks,
    )
    built = build_model(options)
    engine = Engine(built.engine_config, built.runner)
    yield Program(engine, LLM.from_parts(engine, load_tokenizer(real_checkpoint())))
    built.close()


@dataclass
class Judge:
    """Compares results with transformers. It judges equal results once."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    gaps: dict[tuple[str, tuple[int, ...]], list[float]] = field(default_factory=dict)

    def check(self, prompts: Sequence[str], results: Sequence[OfflineResult]) -> None:
        """Raises AssertionError with the prompts whose results are not the greedy ones."""
        keys = [(p, r.token_ids) for p, r in zip(prompts, results, strict=True)]
        self._judge([key for key in keys if key not in self.gaps])
        wrong = {key: self.gaps[key] for key in keys if max(self.gaps[key]) > NEAR_TIE}
        assert not wrong
        assert sum(gap > 0 for key in keys for gap in self.gaps[key]) <= MAX_TIES
        for result in results:
            tokens = list(result.token_ids)
            assert result.text == self.tokenizer.decode(tokens, skip_special_tokens=True)
            assert self.tokenizer.eos_token_id not in tokens[:-1]
            is_ended = tokens[-1] == self.tokenizer.eos_token_id
            assert is_ended or len(tokens) == GREEDY.max_tokens
            assert result.finish_reason == (FinishReason.STOP if is_ended else FinishReason.LENGTH)

    def _judge(self, keys: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        prompts = [self.tokenizer.encode(prompt) for prompt, _ in keys]
        found = greedy_gaps(self.model, prompts, [tokens for _, tokens in keys])
        self.gaps.update(zip(keys, found, strict=True))


@pytest.fixture(scope="module")
def judge() -> Judge:
    directory = real_checkpoint()
    return Judge(float32_model(directory), AutoTokenizer.from_pretrained(directory))


@pytest.fixture(scope="module")
def roomy() -> Iterator[Program]:
    with program(NUM_BLOCKS) as made:
        yield made


@pytest.fixture(scope="module")
def together(roomy: Program) -> list[OfflineResult]:
    return roomy.generate(VARIED_PROMPTS)


def test_sixty_prompts_together_give_the_greedy_tokens_and_text_of_transformers(
    judge: Judge, together: list[OfflineResult]
) -> None:
    assert len(set(VARIED_PROMPTS)) == 60
    assert sum(result.num_prompt_tokens > 600 for result in together) == 2
    judge.check(VARIED_PROMPTS, together)


def test_cached_prefixes_give_them_again(
    judge: Judge, roomy: Program, together: list[OfflineResult]
) -> None:
    again = roomy.generate(VARIED_PROMPTS)
    for result in again:
        assert result.num_cached_tokens == (result.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert sum(result.num_cached_tokens > 0 for result in again) > 40
    judge.check(VARIED_PROMPTS, again)


def test_a_kv_cache_that_is_too_small_gives_them_again(judge: Judge) -> None:
    prompts = VARIED_PROMPTS[1::2]
    with program(FEW_BLOCKS) as cramped:
        results = cramped.generate(prompts)
        assert cramped.stats.preemptions > 0
    assert max(result.num_prompt_tokens for result in results) > 600
    judge.check(prompts, results)


def test_a_prompt_alone_gives_them_as_well(judge: Judge) -> None:
    prompts = VARIED_PROMPTS[::5]
    with program(FEW_BLOCKS) as fresh:
        results = [fresh.generate([prompt])[0] for prompt in prompts]
    assert [result.num_cached_tokens for result in results] == [0] * len(prompts)
    judge.check(prompts, results)

"""Log probabilities of prompts are those of transformers' own forward, however the work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.messages import FinishReason, PromptLogprob, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_run import Generated, generate, new_engine
from tests.support.torch_device import torch_device
from worker.engine.batch import ScheduledBatch
from worker.engine.engine import Engine
from worker.engine.errors import OutOfMemory
from worker.engine.ports import ModelRunner, StepHandle
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model
from worker.model.sampling import prompt_scorer

LENGTHS = (1, 2, 5, 16, 17, 33, 50)
SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=3)
UNLIMITED = 4096


@dataclass(frozen=True)
class Case:
    path: Path
    prompts: list[list[int]]
    expected: list[torch.Tensor]  # of each prompt [tokens, vocab]

    def build(self, **options: object) -> BuiltModel:
        base = EngineOptions(
            checkpoint=str(self.path),
            device=torch_device().type,
            dtype="float32",
            num_kv_blocks=256,
        )
        return build_model(replace(base, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, 300, 24).tolist()
    prompts = [
        (beginning[: length // 2] + rng.integers(0, 300, length).tolist())[:length]
        for length in LENGTHS
        for _ in range(2)
    ]
    with torch.inference_mode():
        expected = [model(torch.tensor([p])).logits[0].log_softmax(-1) for p in prompts]
    return Case(path, prompts, expected)


def check(case: Case, results: Sequence[Generated], *, num_top: int = 3) -> None:
    for prompt, expected, result in zip(case.prompts, case.expected, results, strict=True):
        check_one(prompt, expected, result.prompt_logprobs, num_top)


def check_one(
    prompt: list[int], expected: torch.Tensor, found: Sequence[PromptLogprob], num_top: int
) -> None:
    assert [entry.token_id for entry in found] == prompt[1:], "each once, in order"
    for row, entry in zip(expected, found, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
        likelier = int((row > row[entry.token_id] + 1e-4).sum())
        assert likelier < entry.rank <= int((row > row[entry.token_id] - 1e-4).sum()) + 1
        best = row.topk(num_top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-3)
        for token_id, value in entry.top:
            assert value == pytest.approx(row[token_id].item(), abs=1e-3)


@pytest.mark.promise(
    "Clients: log probabilities of the prompt equal those of transformers' forward to 1e-3, each "
    "once and in order, with any cache, preemption or failure (float32; bfloat16 and int8 tiers as "
    "close as the reference tier)"
)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunk", [1, 7, UNLIMITED])
def test_every_chunk_size(case: Case, chunk: int, block_size: int) -> None:
    built = case.build(max_num_batched_tokens=chunk, block_size=block_size)
    check(case, generate(new_engine(built), case.prompts, SCORED))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_is_scored_is_computed_whatever_the_prefix_cache_has(
    case: Case, lookahead: int
) -> None:
    engine = new_engine(case.build(block_size=4, max_num_batched_tokens=16, lookahead=lookahead))
    plain = generate(engine, case.prompts, replace(SCORED, prompt_logprobs=None), "cold")
    hits = engine.stats().prefix_hit_tokens
    scored = generate(engine, case.prompts, SCORED, "scored")
    check(case, scored)
    assert engine.stats().prefix_hit_tokens == hits, "no hit was taken"
    assert [r.token_ids for r in scored] == [r.token_ids for r in plain]
    generate(engine, case.prompts, replace(SCORED, prompt_logprobs=None), "warm")
    assert engine.stats().prefix_hit_tokens > hits, "and its blocks can be hit"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [7, UNLIMITED])
def test_a_preempted_prompt_is_scored_once(
    case: Case, chunk: int, prefix_caching: bool, lookahead: int
) -> None:
    built = case.build(
        block_size=4,
        num_kv_blocks=20,
        max_num_batched_tokens=chunk,
        prefix_caching=prefix_caching,
        lookahead=lookahead,
    )
    engine = new_engine(built)
    check(case, generate(engine, case.prompts, replace(SCORED, max_tokens=20)))
    assert engine.stats().preemptions > 0


class Failing:
    """Every third launch of several sequences raises, by turns out of memory and as a fault."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size
        self.num_launches = 0

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        self.num_launches += len(batch.sequences) > 1
        if len(batch.sequences) > 1 and self.num_launches % 3 == 0:
            raise OutOfMemory("no room") if self.num_launches % 2 else RuntimeError("a fault")
        return self._inner.launch(batch)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_steps_that_fail_score_nothing_twice(case: Case, lookahead: int) -> None:
    built = case.build(block_size=4, max_num_batched_tokens=32, lookahead=lookahead)
    engine = Engine(built.engine_config, Failing(built.runner))
    check(case, generate(engine, case.prompts, SCORED))
    assert engine.stats().failed_steps > 3


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_alone_is_scored_and_nothing_drawn(case: Case, lookahead: int) -> None:
    built = case.build(block_size=4, max_num_batched_tokens=16, lookahead=lookahead)
    engine = new_engine(built)
    results = generate(engine, case.prompts, replace(SCORED, max_tokens=0, prompt_logprobs=0))
    for prompt, expected, result in zip(case.prompts, case.expected, results, strict=True):
        assert (result.token_ids, result.finish_reason) == ([], FinishReason.LENGTH)
        assert [e.token_id for e in result.prompt_logprobs] == prompt[1:]
        for row, entry in zip(expected, result.prompt_logprobs, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
            assert entry.top == ()
    assert engine.stats().generated_tokens == 0


def test_logits_are_held_for_a_few_rows_at_a_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = case.build()
    vocab_size = built.runner.vocab_size
    monkeypatch.setattr(prompt_scorer, "MAX_LOGITS", 5 * vocab_size)
    most = []
    model = built.runner._model  # type: ignore[attr-defined]
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda rows: most.append(len(rows)) or logits(rows))
    check(case, generate(new_engine(built), case.prompts, SCORED))
    assert max(most[:-6]) == 5, "but for the rows that are sampled from"


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("tier", ["native", "packed"])
def test_the_other_tiers_score_as_the_reference(
    tier: str, quantization: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 300, length).tolist() for length in LENGTHS]
    options = EngineOptions(
        checkpoint=str(path), device="cpu", num_kv_blocks=64, quantization=quantization,
        max_num_batched_tokens=24,
    )  # fmt: skip
    scores = {}
    for name, dtype in (("exact", "float32"), ("reference", "auto"), (tier, "auto")):
        cpu_tier = "reference" if name == "exact" else name
        built = build_model(replace(options, cpu_tier=cpu_tier, dtype=dtype))
        results = generate(new_engine(built), prompts, replace(SCORED, prompt_logprobs=0))
        scores[name] = np.array([e.logprob for r in results for e in r.prompt_logprobs])
    assert len(scores[tier]) == sum(LENGTHS) - len(LENGTHS)
    lost = np.sqrt(np.mean((scores["reference"] - scores["exact"]) ** 2))
    assert np.sqrt(np.mean((scores[tier] - scores["exact"]) ** 2)) <= 1.3 * lost


def test_the_native_tier_scores_what_it_would_sample(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    built = build_model(
        EngineOptions(checkpoint=str(path), device="cpu", num_kv_blocks=64, cpu_tier="native")
    )
    prompt = np.random.default_rng(2).integers(0, 300, 20).tolist()
    greedy = replace(SCORED, logprobs=3, prompt_logprobs=None)
    (output,) = generate(new_engine(built), [prompt], greedy)
    (scored,) = generate(new_engine(built), [prompt + output.token_ids], SCORED)
    for entry, sampled in zip(scored.prompt_logprobs[19:], output.logprobs, strict=True):
        assert (entry.token_id, entry.rank) == (sampled.token_id, 1)
        assert entry.logprob == pytest.approx(sampled.logprob, abs=0.05)

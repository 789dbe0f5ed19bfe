"""The masks of structured rows against the matcher's own word, over a vocabulary of 384."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.messages import Grammar, SamplingParams
from shared.text.base import GrammarInvalid
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar import choice_grammar, json_object_grammar, regex_grammar
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.tokenizer import FastTokenizer
from tests.support.checkpoints import DEFAULT_VOCAB_SIZE, make_checkpoint
from tests.support.torch_device import torch_device
from worker.model.sampling.grammar_masks import GrammarMasks, _cap_on_device, _cap_on_host
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Sampler

ENDS = frozenset({DEFAULT_VOCAB_SIZE - 1, DEFAULT_VOCAB_SIZE - 3})
VOCAB = DEFAULT_VOCAB_SIZE + 11  # and some rows of padding
LETTERS = regex_grammar("[a-z]{1,20}", "p")
YES = choice_grammar(["yes"], "p")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def compiler(tokenizer: FastTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, sorted(ENDS))


@pytest.fixture
def masks(compiler: GrammarCompiler) -> GrammarMasks:
    return GrammarMasks(compiler, ENDS, torch_device())


def row(
    grammar: Grammar | None, outputs: Sequence[int] = (), seq_id: int = 0, **params: object
) -> SamplingRow:
    values = {"max_tokens": 64, "temperature": 0.0, "seed": 1, "grammar": grammar, **params}
    sampling = SamplingParams(**values)  # type: ignore[arg-type]
    return SamplingRow(seq_id, sampling, (0,), outputs, 1 + len(outputs))


def left(masks: GrammarMasks, *rows: SamplingRow) -> list[set[int]]:
    """The tokens that stay possible in each row."""
    logits = torch.zeros((len(rows), VOCAB), device=torch_device())
    assert masks.apply(logits, dict(enumerate(rows))) == {}
    return [set(part.isfinite().nonzero().flatten().tolist()) for part in logits]


def by_matcher(compiler: GrammarCompiler, one: SamplingRow) -> set[int]:
    assert one.params.grammar is not None
    matcher = compiler.matcher(one.params.grammar)
    assert matcher.consume_tokens(list(one.output_token_ids))
    bits = matcher.compute_bitmask()
    return {i for i in range(VOCAB) if bits[i // 8] >> i % 8 & 1}


def test_masks_of_rows_together_and_alone_equal_the_matchers(
    masks: GrammarMasks, compiler: GrammarCompiler, tokenizer: FastTokenizer
) -> None:
    output = [tokenizer.encode(text) for text in ("", "w", "water", "the")]
    rows = [row(LETTERS, ids, seq_id) for seq_id, ids in enumerate(output)]
    rows += [row(json_object_grammar(), tokenizer.encode('{"a'), 7), row(YES, (), 8)]
    expected = [by_matcher(compiler, one) for one in rows]
    assert left(masks, *rows) == expected
    fresh = GrammarMasks(compiler, ENDS, torch_device())
    assert [left(fresh, one)[0] for one in rows] == expected
    assert all(max(part) < DEFAULT_VOCAB_SIZE for part in expected)


def test_masks_made_on_threads_and_used_on_a_device_are_the_same(
    masks: GrammarMasks, compiler: GrammarCompiler, tokenizer: FastTokenizer
) -> None:
    output = [tokenizer.encode(text) for text in ("", "w", "water", "the", "iron")]
    rows = [row(LETTERS, ids, seq_id) for seq_id, ids in enumerate(output)]
    threaded = GrammarMasks(compiler, ENDS, torch.device("meta"))  # not the host, nor CUDA
    assert left(threaded, *rows) == left(masks, *rows)
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, (3, -(-VOCAB // 32)), np.int32)
    logits = torch.randn((5, VOCAB))
    on_host, on_device = logits.clone(), logits.clone()
    _cap_on_host(on_host, [0, 2, 3], bits)
    _cap_on_device(on_device, [0, 2, 3], bits)
    assert torch.equal(on_host, on_device)
    for i, mask in zip((0, 2, 3), bits, strict=True):
        for token_id in range(VOCAB):
            is_set = bool(int(mask[token_id // 32]) >> token_id % 32 & 1)
            assert on_host[i, token_id] == (logits[i, token_id] if is_set else -torch.inf)


def test_only_the_named_rows_of_the_logits_change(masks: GrammarMasks) -> None:
    logits = torch.randn((4, VOCAB), device=torch_device())
    before = logits.clone()
    assert masks.apply(logits, {1: row(YES, seq_id=1), 3: row(LETTERS, seq_id=3)}) == {}
    for i in (0, 2):
        assert torch.equal(logits[i], before[i])
    for i in (1, 3):
        kept = logits[i].isfinite()
        assert 0 < int(kept.sum()) < VOCAB
        assert torch.equal(logits[i][kept], before[i][kept])


def test_a_matcher_goes_on_from_token_to_token_and_starts_again_once_forgotten(
    masks: GrammarMasks, compiler: GrammarCompiler, tokenizer: FastTokenizer
) -> None:
    outputs: list[int] = []
    for token_id in tokenizer.encode("waterfall"):
        one = row(LETTERS, outputs)
        assert left(masks, one) == [by_matcher(compiler, one)]
        outputs.append(token_id)
    masks.forget([0, 99])
    assert left(masks, row(YES)) == [by_matcher(compiler, row(YES))]


def test_ends_are_held_back_as_long_as_there_is_anything_else(
    masks: GrammarMasks, tokenizer: FastTokenizer
) -> None:
    (a,), (z,) = tokenizer.encode("a"), tokenizer.encode("z")
    (free,) = left(masks, row(LETTERS, (a,), 1))
    assert free >= ENDS | {z}
    (held,) = left(masks, row(LETTERS, (a,), 1, min_tokens=2, stop_token_ids=(z,)))
    assert held == free - ENDS - {z}
    (endless,) = left(masks, row(LETTERS, (a,), 1, ignore_eos=True, stop_token_ids=(z,)))
    assert endless == free - ENDS
    whole = tokenizer.encode("yes")
    for params in ({"min_tokens": 60}, {"ignore_eos": True}, {"stop_token_ids": (9999,)}):
        assert left(masks, row(YES, whole, 2, **params)) == [set(ENDS)]


def test_rows_that_break_their_grammar_are_reported_and_left_alone(
    masks: GrammarMasks, tokenizer: FastTokenizer
) -> None:
    logits = torch.zeros((3, VOCAB), device=torch_device())
    rows = {
        0: row(YES, tokenizer.encode("no"), 1),
        1: row(YES, (), 2),
        2: row(replace(YES, text="("), (), 3),
    }
    failed = masks.apply(logits, rows)
    assert set(failed) == {0, 2}
    assert all(why.startswith("grammar_failed: ") for why in failed.values())
    assert "does not follow" in failed[0]
    assert logits[0].isfinite().all()
    assert not logits[1].isfinite().all()


def test_masks_need_a_stop_token(tokenizer: FastTokenizer) -> None:
    with pytest.raises(GrammarInvalid):
        GrammarMasks(GrammarCompiler(tokenizer, VOCAB, ()), frozenset(), torch_device())


class TestSampling:
    """What the sampler makes of them."""

    @pytest.fixture
    def sampler(self, masks: GrammarMasks) -> Sampler:
        return Sampler(
            VOCAB,
            max_num_seqs=8,
            eos_token_ids=ENDS,
            device=torch_device(),
            grammar_masks=masks,
        )

    def sample(self, sampler: Sampler, logits: torch.Tensor, *rows: SamplingRow):  # type: ignore[no-untyped-def]
        nothing = torch.empty(0, dtype=torch.int64, device=torch_device())
        return sampler.sample(logits.to(torch_device()), rows, nothing)

    def test_a_token_outside_the_grammar_is_never_drawn(
        self, sampler: Sampler, compiler: GrammarCompiler
    ) -> None:
        logits = torch.randn((6, VOCAB), generator=torch.Generator().manual_seed(1)) * 5
        rows = [
            row(LETTERS if i % 2 else None, (), i, temperature=(0.0, 1.0, 2.0)[i % 3], top_k=40)
            for i in range(6)
        ]
        drawn = self.sample(sampler, logits, *rows).token_ids.tolist()
        for i in (1, 3, 5):
            assert drawn[i] in by_matcher(compiler, rows[i])
        free = [replace(one, params=replace(one.params, grammar=None)) for one in rows]
        others = self.sample(sampler, logits, *free).token_ids.tolist()
        assert [drawn[i] for i in (0, 2, 4)] == [others[i] for i in (0, 2, 4)]

    def test_log_probabilities_sum_to_one_over_what_is_left(
        self, sampler: Sampler, compiler: GrammarCompiler
    ) -> None:
        logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(2))
        one = row(choice_grammar(["a", "b", "c"], "p"), logprobs=20)
        sampled = self.sample(sampler, logits, one)
        (entry,) = sampled.logprobs.to_host().by_row(sampled.token_ids.tolist()).values()
        assert {token_id for token_id, _ in entry.top} == by_matcher(compiler, one)
        assert math.isclose(sum(math.exp(value) for _, value in entry.top), 1.0, rel_tol=1e-5)

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 5},
            {"temperature": 1.0, "min_p": 0.1, "top_p": 0.9},
        ],
        ids=str,
    )
    def test_a_model_that_thinks_nothing_allowed_possible_shows_it(
        self, sampler: Sampler, changes: dict[str, object]
    ) -> None:
        logits = torch.zeros((4, VOCAB))
        logits[0, :] = -torch.inf
        logits[0, 5] = 1.0  # '&'
        logits[1, 5] = torch.nan
        logits[2, 5] = torch.inf
        rows = [row(YES, (), i, **changes) for i in range(4)]
        healthy = self.sample(sampler, logits[3:], rows[3]).token_ids.tolist()
        sampled = self.sample(sampler, logits, *rows)
        assert sampled.best_logits.isfinite().tolist() == [False, False, False, True]
        assert sampled.token_ids.tolist()[3:] == healthy

    def test_the_strongest_bias_against_all_that_is_left_forbids_none_of_it(
        self, sampler: Sampler, compiler: GrammarCompiler
    ) -> None:
        one = row(YES, logit_bias=dict.fromkeys(range(VOCAB), -100.0))
        sampled = self.sample(sampler, torch.randn((1, VOCAB)), one)
        assert sampled.token_ids.item() in by_matcher(compiler, one)
        assert sampled.best_logits.isfinite().all()


def test_masks_are_charged_to_their_tenants_also_where_they_fail(masks: GrammarMasks) -> None:
    rows = [replace(row(LETTERS, seq_id=i), tenant=tenant) for i, tenant in enumerate("ab")]
    begun_s = time.process_time()
    for _ in range(2):
        left(masks, *rows)
    took_s = time.process_time() - begun_s
    seconds = masks.times.drain()
    assert seconds.keys() == {"a", "b"}
    assert 0 < sum(seconds.values()) <= took_s
    assert masks.times.drain() == {}
    wrong = replace(row(YES, outputs=[1, 2, 3], seq_id=7), tenant="c")
    assert masks.masks_of({0: wrong})[2].keys() == {0}
    assert masks.times.drain()["c"] > 0

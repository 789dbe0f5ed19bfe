"""The sampler draws from the stated distribution, each row by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.messages import SamplingParams
from tests.support.sampling_exact import exact_distribution, noise_floor, total_variation
from tests.support.torch_device import torch_device
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Sampled, Sampler, best_of_rows

VOCAB = 40
NOTHING = torch.empty(0, dtype=torch.int64)
PLAIN = SamplingParams(temperature=1.0, max_tokens=64, seed=0)


def new_sampler(vocab: int = VOCAB, eos: Sequence[int] = ()) -> Sampler:
    return Sampler(vocab, max_num_seqs=64, eos_token_ids=frozenset(eos), device=torch_device())


def row(
    params: SamplingParams,
    *,
    seq_id: int = 0,
    prompt: Sequence[int] = (1,),
    outputs: Sequence[int] = (),
    position: int | None = None,
    in_flight: int | None = None,
) -> SamplingRow:
    end = len(prompt) + len(outputs) + (in_flight is not None)
    return SamplingRow(
        seq_id, params, prompt, outputs, end if position is None else position, in_flight
    )


def sample(
    sampler: Sampler,
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    previous: torch.Tensor = NOTHING,
) -> Sampled:
    device = torch_device()
    return sampler.sample(logits.to(device), rows, previous.to(device))


def random_logits(seed: int, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, generator=generator) * scale


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 5, "temperature": 0.7},
        {"top_p": 0.8},
        {"top_p": 0.3, "temperature": 1.7},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 0.9},
        {"top_k": 8, "top_p": 0.9},
    ],
)
def test_draws_come_from_the_exact_distribution(changes: dict[str, float]) -> None:
    params = replace(PLAIN, seed=12345, **changes)  # type: ignore[arg-type]
    logits = random_logits(1)
    distribution = exact_distribution(logits.numpy(), params)
    num_draws = 20_000
    rows = [row(params, seq_id=i, position=i + 1) for i in range(num_draws)]
    sampled = sample(new_sampler(), logits.expand(num_draws, -1), rows)
    counts = np.bincount(sampled.token_ids.cpu().numpy(), minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(distribution))
    likely = distribution * num_draws > 20
    assert (counts[likely] > 0).all()
    floor = noise_floor(distribution, num_draws)
    assert total_variation(counts, distribution) < 1.5 * floor + 1e-9


def test_seeds_are_independent_streams() -> None:
    logits = torch.zeros(VOCAB)
    num_draws = 20_000
    rows = [row(replace(PLAIN, seed=i), seq_id=i) for i in range(num_draws)]
    sampled = sample(new_sampler(), logits.expand(num_draws, -1), rows)
    counts = np.bincount(sampled.token_ids.cpu().numpy(), minlength=VOCAB)
    uniform = np.full(VOCAB, 1 / VOCAB)
    assert total_variation(counts, uniform) < 1.5 * noise_floor(uniform, num_draws)


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    choices = [
        PLAIN,
        replace(PLAIN, temperature=0.0),
        replace(PLAIN, top_k=3),
        replace(PLAIN, top_p=0.5, temperature=1.5),
        replace(PLAIN, min_p=0.2, logprobs=2),
        replace(PLAIN, repetition_penalty=1.5, logit_bias={3: 5.0}),
    ]
    rows = [row(replace(choices[i % 6], seed=i), seq_id=i, position=1 + i * i) for i in range(36)]
    logits = torch.stack([random_logits(i) for i in range(36)])
    together = sample(new_sampler(), logits, rows).token_ids.tolist()
    alone = [
        sample(new_sampler(), logits[i : i + 1], [rows[i]]).token_ids.item() for i in range(36)
    ]
    backwards = sample(new_sampler(), logits.flip(0), rows[::-1]).token_ids.tolist()
    assert together == alone == backwards[::-1]


def test_another_seed_or_position_draws_other_tokens() -> None:
    logits = torch.zeros(VOCAB).expand(50, -1)
    same = sample(new_sampler(), logits, [row(PLAIN, seq_id=i) for i in range(50)])
    assert len(set(same.token_ids.tolist())) == 1
    moved = sample(new_sampler(), logits, [row(PLAIN, position=i) for i in range(50)])
    seeded = sample(new_sampler(), logits, [row(replace(PLAIN, seed=-i)) for i in range(50)])
    assert len(set(moved.token_ids.tolist())) > 20
    assert len(set(seeded.token_ids.tolist())) > 20


def test_top_k_of_one_is_greedy_also_among_equals() -> None:
    logits = torch.stack([random_logits(i).round() for i in range(200)])
    rows = [row(replace(PLAIN, top_k=1, seed=i), seq_id=i) for i in range(200)]
    greedy = [row(replace(PLAIN, temperature=0.0), seq_id=i) for i in range(200)]
    expected = sample(new_sampler(), logits, greedy).token_ids.tolist()
    assert sample(new_sampler(), logits, rows).token_ids.tolist() == expected
    nucleus = [replace(r, params=replace(PLAIN, top_p=0.0)) for r in rows]
    assert sample(new_sampler(), logits, nucleus).token_ids.tolist() == expected
    assert expected == [int(np.argmax(x)) for x in logits.numpy()]


def test_the_coldest_temperature_is_greedy() -> None:
    logits = torch.stack([random_logits(i) * 1e4 for i in range(50)])
    cold = replace(PLAIN, temperature=1e-300)
    rows = [row(cold, seq_id=i, position=i) for i in range(50)]
    assert torch.equal(sample(new_sampler(), logits, rows).token_ids.cpu(), logits.argmax(dim=1))


def test_the_sampler_leaves_the_logits_alone() -> None:
    logits = torch.stack([random_logits(i) for i in range(3)])
    before = logits.clone()
    params = replace(PLAIN, logit_bias={0: 9.0}, presence_penalty=1.0, top_k=2, logprobs=1)
    sample(new_sampler(), logits, [row(params, seq_id=i) for i in range(3)])
    assert torch.equal(logits, before)


def test_logit_bias_forces_and_forbids() -> None:
    logits = random_logits(0).expand(2, -1)
    best = int(logits[0].argmax())
    rows = [
        row(replace(PLAIN, temperature=0.0, logit_bias={7: 100.0}), seq_id=0),
        row(replace(PLAIN, temperature=0.0, logit_bias={best: -100.0}), seq_id=1),
    ]
    forced, forbidden = sample(new_sampler(), logits, rows).token_ids.tolist()
    assert forced == 7
    assert forbidden == int(logits[0].topk(2).indices[1])


def test_penalties_follow_their_formula() -> None:
    prompt, outputs = [1, 2, 2], [3, 3, 4]
    logits = random_logits(5)
    params = replace(
        PLAIN,
        temperature=0.0,
        repetition_penalty=1.7,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        logit_bias={3: 1.5},
        logprobs=20,
    )
    expected = logits.numpy().astype(np.float64).copy()
    expected[3] += 1.5
    for token in {1, 2, 3, 4}:
        expected[token] *= 1 / 1.7 if expected[token] > 0 else 1.7
    for token, count in ((3, 2), (4, 1)):
        expected[token] -= 0.6 + 0.4 * count
    expected -= math.log(np.exp(expected).sum())
    sampled = sample(new_sampler(), logits[None], [row(params, prompt=prompt, outputs=outputs)])
    assert sampled.logprobs is not None
    entry = sampled.logprobs.to_host().by_row(sampled.token_ids.tolist())[0]
    assert [t for t, _ in entry.top] == np.argsort(-expected)[:20].tolist()
    assert [v for _, v in entry.top] == pytest.approx(sorted(expected)[::-1][:20], abs=1e-4)


def test_penalties_count_the_token_in_flight_once() -> None:
    params = replace(PLAIN, temperature=0.0, frequency_penalty=2.0, logprobs=1)
    logits = random_logits(5)[None]
    fresh = sample(new_sampler(), logits, [row(params, outputs=[3, 9, 9])])
    sampler = new_sampler()
    sample(sampler, logits, [row(params, outputs=[3])])
    seen_late = row(params, outputs=[3], in_flight=1)
    sample(sampler, logits, [seen_late], torch.tensor([5, 9]))
    followed = sample(
        sampler, logits, [row(params, outputs=[3, 9], in_flight=0)], torch.tensor([9])
    )
    assert followed.logprobs is not None
    assert fresh.logprobs is not None
    assert torch.equal(followed.logprobs.chosen, fresh.logprobs.chosen)


def test_min_tokens_holds_back_every_end() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 6]] = 50.0
    params = replace(PLAIN, min_tokens=3, stop_token_ids=(6, 10**6))
    sampler = new_sampler(eos=[4])
    for num_outputs in range(3):
        drawn = sample(sampler, logits, [row(params, outputs=[0] * num_outputs)])
        assert drawn.token_ids.item() not in (4, 6)
    assert sample(sampler, logits, [row(params, outputs=[0] * 3)]).token_ids.item() in (4, 6)
    deaf = replace(params, ignore_eos=True)
    assert sample(new_sampler(eos=[4]), logits, [row(deaf)]).token_ids.item() == 4


def test_logprobs_are_before_temperature_and_filters() -> None:
    logits = random_logits(3)
    params = replace(PLAIN, temperature=0.5, top_k=2, logprobs=4)
    sampled = sample(new_sampler(), logits[None], [row(params)])
    assert sampled.logprobs is not None
    entry = sampled.logprobs.to_host().by_row(sampled.token_ids.tolist())[0]
    expected = logits.log_softmax(0)
    assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-5)
    assert [t for t, _ in entry.top] == logits.topk(4).indices.tolist()
    zero = sample(new_sampler(), logits[None], [row(replace(params, logprobs=0))])
    assert zero.logprobs is not None
    assert zero.logprobs.to_host().by_row(zero.token_ids.tolist())[0].top == ()


def test_impossible_tokens_are_not_among_the_best() -> None:
    params = replace(PLAIN, min_tokens=1, stop_token_ids=tuple(range(3, VOCAB)), logprobs=10)
    sampled = sample(new_sampler(), random_logits(3)[None], [row(params)])
    assert sampled.logprobs is not None
    entry = sampled.logprobs.to_host().by_row(sampled.token_ids.tolist())[0]
    assert sorted(t for t, _ in entry.top) == [0, 1, 2]


def test_more_logprobs_than_tokens_gives_them_all() -> None:
    sampled = sample(new_sampler(8), random_logits(3, 8)[None], [row(replace(PLAIN, logprobs=20))])
    assert sampled.logprobs is not None
    assert len(sampled.logprobs.to_host().by_row(sampled.token_ids.tolist())[0].top) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 5, "top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "logprobs": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_p": 0.9},
        {"logit_bias": {3: 2.0, 17: -2.0}, "presence_penalty": 0.5, "min_tokens": 9, "min_p": 0.1},
    ],
    ids=str,
)
def test_a_row_without_a_distribution_shows_it_and_harms_no_other(
    bad: float, changes: dict[str, object]
) -> None:
    params = replace(PLAIN, **changes)  # type: ignore[arg-type]
    logits = torch.stack([random_logits(i) for i in range(3)])
    rows = [row(replace(params, seed=i), seq_id=i, outputs=[17, 4]) for i in range(3)]
    healthy = sample(new_sampler(eos=[2]), logits, rows).token_ids.tolist()
    logits[1, 17 if bad != -math.inf else slice(None)] = bad
    sampled = sample(new_sampler(eos=[2]), logits, rows)
    assert torch.isfinite(sampled.best_logits).tolist() == [True, False, True]
    tokens = sampled.token_ids.tolist()
    assert (tokens[0], tokens[2]) == (healthy[0], healthy[2])
    assert 0 <= tokens[1] < VOCAB
    alone = sample(new_sampler(eos=[2]), logits[1:2], rows[1:2])
    assert not torch.isfinite(alone.best_logits).any()
    assert 0 <= alone.token_ids.item() < VOCAB


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_whose_every_token_is_suppressed_harms_no_other(changes: dict[str, object]) -> None:
    params = replace(PLAIN, **changes)  # type: ignore[arg-type]
    barred = replace(params, min_tokens=9, stop_token_ids=tuple(range(VOCAB)))
    logits = torch.stack([random_logits(i) for i in range(2)])
    healthy = sample(new_sampler(), logits[:1], [row(params)]).token_ids.tolist()
    tokens = sample(new_sampler(), logits, [row(params), row(barred, seq_id=1)]).token_ids.tolist()
    assert tokens[:1] == healthy
    assert 0 <= tokens[1] < VOCAB


def test_impossible_logits_of_the_model_itself_are_no_fault() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 11] = 1.0
    sampled = sample(new_sampler(), logits, [row(replace(PLAIN, top_p=0.9))])
    assert sampled.token_ids.tolist() == [11]
    assert torch.isfinite(sampled.best_logits).all()


def test_a_large_vocabulary_keeps_the_exact_support() -> None:
    vocab = 5000
    flat = random_logits(9, vocab, scale=0.3)  # a nucleus far larger than the window
    for changes in ({"top_p": 0.9}, {"top_k": 3000}, {"top_k": 2000, "top_p": 0.5}, {"min_p": 0.3}):
        params = replace(PLAIN, **changes)  # type: ignore[arg-type]
        support = set(np.flatnonzero(exact_distribution(flat.numpy(), params)))
        rows = [row(params, seq_id=i, position=i) for i in range(64)]
        drawn = set(sample(new_sampler(vocab), flat.expand(64, -1), rows).token_ids.tolist())
        assert drawn <= support
        assert len(drawn) > 30


def test_forgotten_sequences_free_their_sampler_state() -> None:
    params = replace(PLAIN, temperature=0.0, frequency_penalty=2.0, logit_bias={1: 3.0}, logprobs=0)
    logits = random_logits(2)[None]
    sampler = new_sampler()
    first = sample(sampler, logits, [row(params, outputs=[5, 5, 5])])
    sampler.forget([0, 99])
    again = sample(sampler, logits, [row(params, outputs=[5, 5, 5])])
    assert first.logprobs is not None
    assert again.logprobs is not None
    assert torch.equal(first.logprobs.chosen, again.logprobs.chosen)


@pytest.mark.parametrize("vocab_size", [1, 511, 1023, 1024, 1025, 1500, 4096])
def test_the_best_of_rows_is_torchs_and_the_first_of_equals(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    random = torch.randn(16, vocab_size, generator=generator).to(torch.bfloat16)  # many are equal
    flat = torch.zeros(2, vocab_size, dtype=torch.bfloat16)
    last = flat.clone()
    last[:, -1] = 1
    impossible = torch.full((1, vocab_size), -torch.inf, dtype=torch.bfloat16)
    logits = torch.cat([random, flat, last, impossible])
    best, places = best_of_rows(logits)
    assert torch.equal(best, logits.amax(dim=1))
    expected = [(row == row.max()).nonzero()[0, 0].item() for row in logits.float()]
    assert places.tolist() == expected


@pytest.mark.parametrize("place", [0, 700, 1299])
def test_a_nan_is_the_best_wherever_it_is(place: int) -> None:
    logits = torch.randn(2, 1300)
    logits[1, place] = torch.nan
    best, places = best_of_rows(logits)
    assert best.isnan().tolist() == [False, True]
    assert places[1] == place

"""The sampling kernels draw what torch's operators draw, which are their specification.

On the CPU they run in Triton's interpreter, which takes a tenth of a second a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.messages import SamplingParams
from tests.support.sampling_exact import exact_distribution, noise_floor, total_variation
from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton
from worker.model.device import StepTimer
from worker.model.sampling.noise import gumbel, row_keys, seed_keys
from worker.model.sampling.partial import PartialSample
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Sampled, Sampler

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not has_triton(), reason=NO_TRITON),
    # The interpreter's numpy warns of infinities, which kernels compute with on purpose.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

VOCAB = 40
WIDE = 5000  # three blocks, of which the last is not full
EOS = 2
PLAIN = SamplingParams(temperature=1.0, max_tokens=64, seed=0)
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1e-300},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.7},
    {"top_p": 0.0},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_p": 0.6, "min_p": 0.02},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 0.9},
    {"repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": -0.4},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.5, "top_p": 0.9},
    {"logit_bias": {3: 6.0, 17: -4.0, 39: 5.0}},
    {"temperature": 0.0, "logit_bias": {39: 100.0}},
    {"min_tokens": 9, "stop_token_ids": (7, 10**6)},
    {"min_tokens": 9, "ignore_eos": True, "stop_token_ids": (30,), "top_k": 3},
    {"temperature": 0.0, "logprobs": 3},
    {"logprobs": 20, "top_k": 4, "presence_penalty": 1.1, "logit_bias": {5: 2.0}},
)
NOTHING = torch.empty(0, dtype=torch.int64)


def samplers(vocab: int, masks: Any = None) -> tuple[Sampler, Sampler]:
    """Returns one with the kernels and one without."""

    def sampler(device: torch.device, uses_kernels: bool) -> Sampler:
        return Sampler(
            vocab,
            max_num_seqs=512,
            eos_token_ids=frozenset([EOS]),
            device=device,
            grammar_masks=masks,
            uses_kernels=uses_kernels,
        )

    return sampler(torch_device(), True), sampler(torch.device("cpu"), False)


def rows_of(params: Sequence[SamplingParams]) -> list[SamplingRow]:
    return [SamplingRow(i, p, (1, 2, 2), (17, 39, 17), 6 + i) for i, p in enumerate(params)]


def random_logits(shape: tuple[int, int], dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def same(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    both: tuple[Sampler, Sampler] | None = None,
    previous: Tensor = NOTHING,
) -> Sampled:
    """Returns what the kernels draw, which the CPU draws as well."""
    ours, theirs = both or samplers(logits.shape[1])
    there = logits.to(torch_device())
    drawn = ours.sample(there, rows, previous.to(torch_device()))
    expected = theirs.sample(logits, rows, previous)
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(there.cpu(), logits), "logits stay as they are"
    best = drawn.best_logits.cpu()
    torch.testing.assert_close(best, expected.best_logits.float(), rtol=0, atol=0)
    assert (drawn.logprobs is None) == (expected.logprobs is None)
    if drawn.logprobs is not None and expected.logprobs is not None:
        mine, its = drawn.logprobs.to_host(), expected.logprobs
        assert (mine.rows, mine.num_top) == (its.rows, its.num_top)
        torch.testing.assert_close(mine.chosen, its.chosen, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.top, its.top, rtol=0, atol=1e-5)
    assert dict(drawn.failed) == dict(expected.failed)
    return drawn


def test_noise_is_that_of_the_specification_in_its_upper_tail_too() -> None:
    """The largest of a million tokens' are there, whose uniform numbers are the smallest."""
    from tests.support.noise_kernel import noise_of

    keys, positions = seed_keys([0, -1, 2**63 - 1]), np.array([0, 7, 10**6], dtype=np.int64)
    of_rows = torch.from_numpy(row_keys(keys, positions))[:, None]
    largest = [
        gumbel(key, torch.arange(start, start + (1 << 20))).topk(20).indices[0] + start
        for key, start in zip(of_rows[:, None], (0, 50_000, 1 << 20), strict=True)
    ]
    token_ids = torch.cat([torch.arange(1000), *largest])
    device = torch_device()
    noise = torch.empty((3, len(token_ids)), device=device)
    noise_of[(3,)](
        torch.from_numpy(keys.view(np.int64)).to(device),
        torch.from_numpy(positions).to(device),
        token_ids.int().to(device),
        noise,
        len(token_ids),
        BLOCK=2048,
    )
    expected = gumbel(of_rows, token_ids)
    assert expected.max() > 13
    torch.testing.assert_close(noise.cpu(), expected, rtol=3e-7, atol=2e-7)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(VOCAB, torch.float32), (WIDE, torch.bfloat16), (2048, torch.float16)],
    ids=str,
)
def test_every_row_by_its_own_parameters_beside_all_others(vocab: int, dtype: torch.dtype) -> None:
    """With bfloat16 many tokens are equal where a filter ends."""
    params = [replace(PLAIN, seed=i, **changes) for i, changes in enumerate(CHANGES)]
    same(random_logits((len(params), vocab), dtype), rows_of(params))


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_batch_of_rows_that_want_the_same(changes: dict[str, Any]) -> None:
    params = [replace(PLAIN, seed=100 + i, **changes) for i in range(2)]
    same(random_logits((2, 300), torch.bfloat16), rows_of(params))


def test_rows_that_lie_apart() -> None:
    params = [replace(PLAIN, seed=i, top_p=0.5 + i / 2) for i in range(2)]
    padded = random_logits((2, 2 * VOCAB), torch.bfloat16)
    whole, device = padded.to(torch_device()), torch_device()
    ours, theirs = samplers(VOCAB)
    drawn = ours.sample(whole[:, :VOCAB], rows_of(params), NOTHING.to(device))
    expected = theirs.sample(padded[:, :VOCAB], rows_of(params), NOTHING)
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("scale", [0.0, 0.02, 0.5])
def test_wide_nuclei_and_levels_of_equals(scale: float) -> None:
    """Up to all of 9001 tokens are one level: more than a kernel holds in registers at once."""
    changes: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 3000},
        {"top_k": 6000, "top_p": 0.3},
        {"min_p": 0.99},
        {"min_p": 0.3, "top_p": 0.7},
    ]
    params = [replace(PLAIN, seed=i, **change) for i, change in enumerate(changes)]
    same(random_logits((len(params), 9001), torch.bfloat16, scale), rows_of(params))


def test_any_mix_of_filters_over_few_levels() -> None:
    """Where a filter ends among equals, the lower token ids stay."""
    random = np.random.default_rng(1)
    params = [
        replace(
            PLAIN,
            seed=i,
            temperature=float(random.choice([0.5, 1.0, 2.0])),
            top_k=int(random.choice([0, random.integers(1, 65)])),
            top_p=float(random.choice([1.0, 0.5, random.random()])),
            min_p=float(random.choice([0.0, random.random()])),
        )
        for i in range(60)
    ]
    same(random_logits((60, 64), torch.bfloat16, 1.0).round(), rows_of(params))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution_shows_it_and_harms_no_other(bad: float) -> None:
    """A NaN in the first block and one in the last."""
    params = [replace(PLAIN, seed=i, **CHANGES[i]) for i in range(len(CHANGES))]
    rows = rows_of(params)
    logits = random_logits((len(rows), VOCAB), torch.float32)
    healthy = same(logits, rows).token_ids.tolist()
    logits[::2, 17 if bad != -math.inf else slice(None)] = bad
    ours, _ = samplers(VOCAB)
    drawn = ours.sample(logits.to(torch_device()), rows, NOTHING.to(torch_device()))
    assert torch.isfinite(drawn.best_logits).tolist() == [i % 2 == 1 for i in range(len(rows))]
    tokens = drawn.token_ids.tolist()
    assert tokens[1::2] == healthy[1::2]
    assert all(0 <= token < VOCAB for token in tokens)


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_whose_every_token_is_suppressed_draws_inside_the_vocabulary(
    changes: dict[str, Any],
) -> None:
    params = replace(PLAIN, **changes)
    barred = replace(params, min_tokens=9, stop_token_ids=tuple(range(VOCAB)))
    logits = random_logits((2, VOCAB), torch.float32)
    healthy = same(logits[:1], rows_of([params])).token_ids.tolist()
    ours, _ = samplers(VOCAB)
    drawn = ours.sample(
        logits.to(torch_device()), rows_of([params, barred]), NOTHING.to(torch_device())
    )
    tokens = drawn.token_ids.tolist()
    assert tokens[:1] == healthy
    assert 0 <= tokens[1] < VOCAB


def test_penalties_and_min_tokens_follow_a_sequence_and_its_token_in_flight() -> None:
    both = samplers(300)
    changes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0, "frequency_penalty": 2.0, "min_tokens": 3, "stop_token_ids": (5,)}
        | {"logit_bias": {5: 50.0}},
        {"repetition_penalty": 1.8, "logprobs": 5},
        {"presence_penalty": 1.0, "top_k": 40},
    )
    params = [replace(PLAIN, seed=i, **change) for i, change in enumerate(changes)]
    outputs: list[list[int]] = [[], [], []]
    previous = NOTHING
    for step in range(5):
        is_known = step % 2 == 0
        rows = []
        for i, known in enumerate(outputs):
            in_flight = None if is_known else i
            seen = known if is_known else known[:-1]
            rows.append(SamplingRow(i, params[i], (7, 8), list(seen), 2 + step, in_flight))
        previous = same(random_logits((3, 300), torch.bfloat16), rows, both, previous).token_ids
        previous = previous.cpu()
        for known, token in zip(outputs, previous.tolist(), strict=True):
            known.append(token)
    assert [token == 5 for token in outputs[0]] == [False, False, False, True, True]


class Masks:
    """Stands for GrammarMasks: sequence i may have the tokens that i + 2 divides; one failed."""

    def masks_of(
        self, rows: Mapping[int, SamplingRow]
    ) -> tuple[list[int], np.ndarray[Any, Any], dict[int, str]]:
        indices = [i for i, row in rows.items() if row.seq_id != 1]
        masks = np.zeros((len(indices), -(-VOCAB // 32)), dtype=np.int32)
        words = masks.view(np.uint32)
        for n, i in enumerate(indices):
            for token in range(0, VOCAB, rows[i].seq_id + 2):
                words[n, token // 32] |= np.uint32(1 << token % 32)
        return indices, masks, {i: "cannot be followed" for i in rows if i not in indices}

    def forget(self, seq_ids: Iterable[int]) -> None:
        pass

    def apply(self, logits: Tensor, rows: Mapping[int, SamplingRow]) -> dict[int, str]:
        indices, _, failed = self.masks_of(rows)
        for i in indices:
            allowed = torch.zeros(VOCAB, dtype=torch.bool)
            allowed[:: rows[i].seq_id + 2] = True
            logits[i].masked_fill_(~allowed, -torch.inf)
        return failed


STRUCTURED: tuple[dict[str, Any], ...] = (
    {"grammar": "a"},
    {"grammar": "b"},
    {},
    {"grammar": "c", "top_p": 0.9, "logprobs": 4, "min_tokens": 30, "stop_token_ids": (5,)},
    {"grammar": "d", "temperature": 0.0, "presence_penalty": 0.5},
    {"grammar": "e"},
    {"repetition_penalty": 1.4, "top_k": 7},
)
APART = [2, 6], [0, 1, 3, 4, 5]  # rows without a grammar, and those with one


def test_rows_keep_to_their_grammars_masks() -> None:
    params = [replace(PLAIN, seed=i, **change) for i, change in enumerate(STRUCTURED)]
    logits = random_logits((len(params), VOCAB), torch.float32)
    logits[5, ::7] = -math.inf  # what the mask leaves
    drawn = same(logits, rows_of(params), samplers(VOCAB, Masks()))
    assert drawn.best_logits.isfinite().tolist() == [True] * 5 + [False, True]
    assert [drawn.token_ids[i].item() % n for i, n in ((0, 2), (3, 5), (4, 6))] == [0, 0, 0]


def test_rows_drawn_apart_are_those_drawn_together_and_plans_are_uploaded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from worker.model.sampling import cuda_kernels as sampling

    params = [replace(PLAIN, seed=i, **change) for i, change in enumerate(STRUCTURED)]
    device, rows = torch_device(), rows_of(params)
    logits = random_logits((len(params), VOCAB), torch.bfloat16).to(device)
    nothing = NOTHING.to(device)
    together = samplers(VOCAB, Masks())[0].sample(logits, rows, nothing)
    ours, _ = samplers(VOCAB, Masks())
    sent: list[Any] = []
    upload = sampling.to_device
    monkeypatch.setattr(
        sampling, "to_device", lambda array, to: sent.append(array) or upload(array, to)
    )
    for _ in range(2):
        sent.clear()
        sample = PartialSample(ours, logits, rows, nothing)
        parts = [sample.draw(places) for places in APART]
        assert sample.token_ids.tolist() == together.token_ids.tolist()
    assert len(sent) == 3, "what each part's rows have of this step, and the masks"
    assert parts[1].failed == {APART[1].index(i): why for i, why in together.failed.items()}
    for part, places in zip(parts, APART, strict=True):
        assert torch.equal(part.best_logits, together.best_logits[places])


@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 0.9}], ids=str
)
def test_draws_come_from_the_exact_distribution(changes: dict[str, Any]) -> None:
    params = replace(PLAIN, seed=12345, **changes)
    logits = random_logits((1, VOCAB), torch.float32, 2.0)[0]
    distribution = exact_distribution(logits.numpy(), params)
    num_draws = 20_000 if not IS_INTERPRETED else 100 if changes else 400
    rows = [SamplingRow(i, params, (1,), (), i + 1) for i in range(num_draws)]
    ours, _ = samplers(VOCAB)
    drawn = ours.sample(
        logits.to(torch_device()).expand(num_draws, -1), rows, NOTHING.to(torch_device())
    )
    counts = np.bincount(drawn.token_ids.cpu().numpy(), minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(distribution))
    assert total_variation(counts, distribution) < 1.5 * noise_floor(distribution, num_draws)


def test_a_plan_is_uploaded_once_and_a_step_sends_one_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from worker.model.sampling import cuda_kernels as sampling

    sent: list[Any] = []
    upload = sampling.to_device

    def counted(array: Any, device: torch.device) -> Tensor:
        sent.append(array)
        return upload(array, device)

    monkeypatch.setattr(sampling, "to_device", counted)
    ours, _ = samplers(VOCAB)
    params = [replace(PLAIN, top_k=3), replace(PLAIN, logit_bias={4: 1.0}, min_tokens=3)]
    rows = rows_of(params)
    logits, nothing = torch.zeros((2, VOCAB), device=torch_device()), NOTHING.to(torch_device())
    ours.sample(logits, rows, nothing)
    sent.clear()
    for row in rows:
        row.position += 1
    ours.sample(logits, rows, nothing)
    assert len(sent) == 1


@pytest.mark.gpu
def test_drawing_waits_for_nothing() -> None:
    params = [replace(PLAIN, seed=i, **changes) for i, changes in enumerate(CHANGES)]
    rows = rows_of(params)
    ours, _ = samplers(WIDE)
    logits = random_logits((len(rows), WIDE), torch.bfloat16).to(torch_device())
    nothing = NOTHING.to(torch_device())
    ours.sample(logits, rows, nothing)
    structured = rows_of([replace(PLAIN, seed=i, **c) for i, c in enumerate(STRUCTURED)])
    masked, few = samplers(VOCAB, Masks())[0], logits[: len(structured), :VOCAB]
    masked.sample(few, structured, nothing)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.sample(logits, rows, nothing)
        ours.forget(range(len(rows)))
        ours.sample(logits, rows, nothing)
        timer = StepTimer(torch_device())
        sample = PartialSample(masked, few, structured, nothing)
        for places in APART:
            sample.draw(places).to_host()
            timer.end()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 < (timer.wait() or 0) < 60

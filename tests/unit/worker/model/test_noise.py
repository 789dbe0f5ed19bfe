"""The noise is a pure function with the right distribution, the same on every device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.torch_device import torch_device
from worker.model.sampling.noise import HostNoise, gumbel, random_bits, row_keys, seed_keys

MASK = (1 << 64) - 1


def row_key(seed: int, position: int) -> int:
    return int(row_keys(seed_keys([seed]), np.array([position]))[0])


def split_mix(state: int) -> int:
    """The published algorithm, in plain integers."""
    z = state & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def test_bits_are_those_of_splitmix64() -> None:
    keys = [row_key(seed, position) for seed, position in ((0, 0), (-1, 7), (2**63 - 1, 10**6))]
    tokens = [0, 1, 2, 151_935]
    bits = random_bits(
        torch.tensor(keys, device=torch_device())[:, None],
        torch.tensor(tokens, device=torch_device()),
    )
    for key, line in zip(keys, bits.tolist(), strict=True):
        expected = [split_mix(key + (t + 1) * 0x9E3779B97F4A7C15) >> 2 for t in tokens]
        assert line == expected


def test_the_published_first_number_of_seed_zero() -> None:
    first = random_bits(torch.tensor([0]), torch.tensor([0]))
    assert first.item() == 0xE220A8397B1DCDAF >> 2


def test_keys_differ_for_neighbouring_seeds_and_positions() -> None:
    keys = {row_key(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(keys) == 100 * 100
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_gumbel_noise_is_finite_and_has_its_moments() -> None:
    keys = torch.tensor([row_key(3, i) for i in range(64)], device=torch_device())[:, None]
    noise = gumbel(keys, torch.arange(20_000, device=torch_device()))
    assert noise.dtype == torch.float32
    assert torch.isfinite(noise).all()
    wide = noise.double().cpu().numpy()
    assert abs(wide.mean() - 0.5772156649) < 0.005
    assert abs(wide.std() - math.pi / math.sqrt(6)) < 0.005
    # The upper tail, which decides draws over large vocabularies.
    for level in (5.0, 8.0, 10.0):
        expected = -math.expm1(-math.exp(-level)) * wide.size
        assert abs((wide > level).sum() - expected) < 5 * math.sqrt(expected)


def test_rows_and_tokens_are_uncorrelated() -> None:
    keys = torch.tensor([row_key(s, p) for s in range(30) for p in range(30)])[:, None]
    noise = gumbel(keys, torch.arange(200)).double().numpy()
    for shifted in (noise[1:, :], np.roll(noise, 1, axis=1)[1:, :]):
        correlation = np.corrcoef(noise[:-1].ravel(), shifted.ravel())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(noise.size)


@pytest.mark.parametrize("vocab", [1, 7, 4096, 100_003])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0])
def test_what_may_win_has_what_wins(vocab: int, spread: float) -> None:
    noise = HostNoise(HostNoise.counters(vocab))
    generator = torch.Generator().manual_seed(vocab)
    most = 0
    for position in range(20):
        scores = torch.randn(vocab, generator=generator) * spread
        scores -= scores.max()
        key = row_key(5, position)
        best = scores + gumbel(torch.tensor([[key]]), torch.arange(vocab))[0]
        found = noise.may_win(scores.numpy(), np.int64(key))
        assert int(best.argmax()) in found
        assert found.tolist() == sorted(found)
        most = max(most, len(found))
    assert most <= max(100, vocab // 100), "nearly all are left out, or it would be slow"

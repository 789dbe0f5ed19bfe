"""The sampling distribution, computed the slow and obvious way."""

from __future__ import annotations

import math

import numpy as np

from shared.messages import SamplingParams


def exact_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[vocab] float64: temperature, min-p, top-k, top-p over `logits` [vocab]."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept = [i for i in order if p[i] >= params.min_p * p[order[0]]]
    if params.top_k:
        kept = kept[: params.top_k]
    left = math.fsum(p[i] for i in kept)
    nucleus, reached = [], 0.0
    for i in kept:
        nucleus.append(i)
        reached += p[i] / left
        if reached >= params.top_p:
            break
    result = np.zeros_like(p)
    result[nucleus] = p[nucleus]
    return result / result.sum()


def total_variation(counts: np.ndarray, distribution: np.ndarray) -> float:
    return float(np.abs(counts / counts.sum() - distribution).sum() / 2)


def noise_floor(distribution: np.ndarray, num_draws: int) -> float:
    """The expected total variation of that many honest draws."""
    p = distribution
    return float(np.sqrt(2 * p * (1 - p) / (math.pi * num_draws)).sum() / 2)

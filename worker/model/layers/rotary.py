"""Rotary position embedding (arXiv:2104.09864): the tables of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model.config.rope import RopeConfig
from worker.model.parallel.group import Placement


class RotaryEmbedding:
    """Cosines and sines of every position, computed once: [max_model_len, head_dim / 2] each."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_model_len: int, *, placement: Placement
    ) -> None:
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(config, head_dim)[None, :]
        factor = config.attention_factor
        self._cos = (angles.cos() * factor).to(placement.device, placement.dtype)
        self._sin = (angles.sin() * factor).to(placement.device, placement.dtype)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [max_model_len, head_dim / 2] each."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of positions [num_tokens]: each [num_tokens, 1, head_dim / 2]."""
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Returns radians per position, [head_dim / 2] float32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, config.theta**exponents, head_dim)
    raise AssertionError(f"unknown rope kind {config.kind}")


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Returns the frequencies `plain` [head_dim / 2] float32 as Llama 3.1 changes them.

    Long wavelengths are slowed by `factor`, short ones kept, with a ramp between them.
    """
    wavelengths = 2 * math.pi / plain
    longest = config.original_length / config.low_freq_factor
    shortest = config.original_length / config.high_freq_factor
    slowed = torch.where(wavelengths > longest, plain / config.factor, plain)
    share = (config.original_length / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    ramp = (1 - share) * slowed / config.factor + share * slowed
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, ramp, slowed)


def _yarn(config: RopeConfig, periods: Tensor, head_dim: int) -> Tensor:
    """Returns YaRN's frequencies (arXiv:2309.00071) of `periods`, both [head_dim / 2] float32.

    Slow dimensions are interpolated, fast ones kept, with a ramp between them.
    """

    def dimension(rotations: float) -> float:
        turns = config.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return (1.0 / (config.factor * periods)) * (1 - kept) + (1.0 / periods) * kept

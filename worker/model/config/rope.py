"""RopeConfig: the rotary position embedding (arXiv:2104.09864) that config.json declares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.model.errors import UnsupportedModel

_KNOWN_MEMBERS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    # Changes the frequencies beyond the model's positions only, to where no sequence gets here.
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How the embedding is scaled.

    `kind` is default, linear, llama3 or yarn; the members a kind does not use keep defaults.

    `attention_factor` multiplies cosine and sine (YaRN); it is resolved here.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_length: int = 0  # positions before scaling: llama3 and yarn
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Reads a whole config.json; raises UnsupportedModel naming the member at fault."""
        # transformers lets the older spelling win where a file carries both.
        member = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        scaling = raw.get(member) or {}
        if not isinstance(scaling, Mapping):
            raise UnsupportedModel(f"{member} must be an object")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in _KNOWN_MEMBERS:
            known = ", ".join(sorted(_KNOWN_MEMBERS))
            raise UnsupportedModel(f"{member}: rope_type {kind!r} is not supported; known: {known}")
        partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise UnsupportedModel(f"partial_rotary_factor {partial!r} is not supported")
        common = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if unknown := sorted(set(scaling) - common - _KNOWN_MEMBERS[kind]):
            raise UnsupportedModel(f"{member}: {unknown[0]!r} is not known for rope_type {kind!r}")
        read = _Reader(member, scaling)
        theta = read.positive("rope_theta", raw.get("rope_theta") or 10_000.0)
        if kind in ("default", "dynamic"):
            return cls(theta=theta)
        factor = read.positive("factor", None)
        if kind == "linear":
            return cls(kind=kind, theta=theta, factor=factor)
        original = raw.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings", max_position_embeddings
        )
        if not isinstance(original, int) or isinstance(original, bool) or original < 1:
            raise UnsupportedModel(
                f"{member}: original_max_position_embeddings must be a whole number, "
                f"got {original!r}"
            )
        if kind == "llama3":
            low = read.positive("low_freq_factor", None)
            high = read.positive("high_freq_factor", None)
            if high <= low:
                raise UnsupportedModel(f"{member}: high_freq_factor must exceed low_freq_factor")
            return cls(
                kind=kind,
                theta=theta,
                factor=factor,
                original_length=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        truncate = scaling.get("truncate", True)
        if not isinstance(truncate, bool):
            raise UnsupportedModel(f"{member}: truncate must be true or false")
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original_length=original,
            beta_fast=read.positive("beta_fast", 32.0),
            beta_slow=read.positive("beta_slow", 1.0),
            truncate=truncate,
            attention_factor=_yarn_attention_factor(read, factor),
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    member: str
    values: Mapping[str, Any]

    def positive(self, name: str, default: float | None) -> float:
        """Returns a positive number; a default of None makes it required.

        Raises UnsupportedModel.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
            raise UnsupportedModel(
                f"{self.member}: {name} must be a positive number, got {value!r}"
            )
        return float(value)


def _yarn_attention_factor(read: _Reader, factor: float) -> float:
    """Returns YaRN's factor (arXiv:2309.00071, 3.4), or DeepSeek's variant with two `mscale`s."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    if read.values.get("attention_factor") is not None:
        return read.positive("attention_factor", None)
    if read.values.get("mscale") and read.values.get("mscale_all_dim"):
        numerator = magnitude(read.positive("mscale", None))
        return numerator / magnitude(read.positive("mscale_all_dim", None))
    return magnitude(1.0)

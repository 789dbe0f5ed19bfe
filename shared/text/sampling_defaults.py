"""SamplingDefaults: a checkpoint's values for sampling parameters that a request omits.

They are in its generation_config.json, an operator may replace them, and the card carries them. A
frontend reads a card of any release, so it checks the values again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shared.messages import InvalidParameter, SamplingParams

MEMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
KEEP_ALL_TOP_K = -1  # vLLM's and older checkpoints' value for 0
MAX_OVERRIDE_CHARS = 4096

_NEUTRAL: Mapping[str, float | int] = MappingProxyType(
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`values`: of some of MEMBERS, each within the range that a request's has."""

    values: Mapping[str, float | int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> SamplingDefaults:
        """Returns those of `values` that can be used."""
        found = {name: _checked(name, value) for name, value in values.items()}
        return cls({name: value for name, value in found.items() if value is not None})

    def fill(
        self, requested: Mapping[str, float | int | None], *, neutral_temperature: float = 1.0
    ) -> dict[str, Any]:
        """Returns all MEMBERS for a SamplingParams: as `requested`, else the checkpoint's, else the
        neutral value (or `neutral_temperature`)."""
        neutral = {**_NEUTRAL, "temperature": neutral_temperature, **self.values}
        given = {name: value for name, value in requested.items() if value is not None}
        return {**neutral, **given}


def unusable(values: Mapping[str, object]) -> dict[str, object]:
    """Returns those of `values`, by name, that SamplingDefaults leaves out."""
    return {name: value for name, value in values.items() if _checked(name, value) is None}


def parse_override(text: str) -> dict[str, float | int]:
    """Returns the members of a JSON object; {} for no text. Raises ValueError with a sentence."""
    if not text.strip():
        return {}
    if len(text) > MAX_OVERRIDE_CHARS:
        raise ValueError(f"has more than {MAX_OVERRIDE_CHARS} characters")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError('is not a JSON object, such as {"temperature": 0.6}')
    checked = {}
    for name, value in values.items():
        if name not in MEMBERS:
            raise ValueError(f"has {name[:40]!r}; it may have {', '.join(MEMBERS)}")
        usable = _checked(name, value)
        if usable is None:
            raise ValueError(f"has an invalid value of {name}")
        checked[name] = usable
    return checked


def _checked(name: str, value: object) -> float | int | None:
    """Returns the value as SamplingParams takes it; None if SamplingParams refuses it."""
    if name not in MEMBERS or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return None
    if name == "top_k":  # cards hold numbers: 20.0 is 20
        if value != int(value):
            return None
        value = 0 if value == KEEP_ALL_TOP_K else int(value)
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidParameter:
        return None
    return value

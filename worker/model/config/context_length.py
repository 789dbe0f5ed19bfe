"""ContextLength: the tokens that a sequence may have by config.json, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker.model.errors import UnsupportedModel

# Spellings of the positions that a model was made for. The smallest counts.
_MEMBERS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# With these, max_position_embeddings counts the positions after the scaling.
_ALREADY_SCALED = frozenset({"default", "llama3", "longrope", "su", "proportional"})
_YARN = frozenset({"yarn", "deepseek_yarn"})
_LONG = frozenset({"longrope", "su"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """Tokens of prompt and output together."""

    default: int  # where MAX_MODEL_LEN is not set
    longest: int  # what MAX_MODEL_LEN may be; above `default` where frequencies depend on length
    by_yarn: bool = False  # more than the positions that config.json names

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ContextLength | None:
        """Returns the length in a parsed config.json, or `to_dict()` of transformers' config; None
        if it has none. A `text_config` in it is the language model's.

        Raises UnsupportedModel naming the member at fault.
        """
        text = text_config(config)
        named = [(member, text[member]) for member in _MEMBERS if text.get(member) is not None]
        # Cohere's models: the length that they serve, beside one that is larger or smaller.
        if text.get("model_max_length") is not None:
            named = [("model_max_length", text["model_max_length"])]
        if not named:
            return None
        positions = min(_whole(member, value) for member, value in named)
        default = longest = positions
        by_yarn = False
        for scaling in _scalings(text):
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            original = text.get("original_max_position_embeddings") or scaling.get(
                "original_max_position_embeddings"
            )
            if kind in _LONG:
                default = min(default, positions if original is None else int(original))
            elif kind in _YARN:
                extended = int((original or 0) * _factor(scaling))
                by_yarn = extended > longest
                default, longest = max(default, extended), max(longest, extended)
            elif kind not in _ALREADY_SCALED and "gemma3" not in str(config.get("model_type")):
                longest = max(longest, int(positions * _factor(scaling)))
                default = default if kind == "dynamic" else longest
        return cls(default=default, longest=longest, by_yarn=by_yarn)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the members of the language model: those of a multimodal model's `text_config`, and
    of the whole where that leaves one out."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the rotary embeddings' parameters: one, or one of each type of layers."""
    member = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(member) or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModel(f"{member} must be an object")
    by_layers = [value for value in scaling.values() if isinstance(value, Mapping)]
    yield from by_layers or [scaling]


def _factor(scaling: Mapping[str, Any]) -> float:
    value = scaling.get("factor")
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModel(
            f"the rotary embedding's factor must be a positive number, got {value!r}"
        )
    return float(value)


def _whole(member: str, value: Any) -> int:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value < 2**63:
        raise UnsupportedModel(f"{member} must be a whole number of at least 1, got {value!r}")
    return int(value)

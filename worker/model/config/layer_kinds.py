"""LayerKind: how the layers of one model differ, and how config.json declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from worker.model.errors import UnsupportedModel

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's attention."""

    window: int | None = None  # a query sees that many last keys, its own included; None: all
    is_local: bool = False  # rotates by the frequencies of local layers, where they have their own


class Windows(Enum):
    """Where a family's config.json has its sliding windows."""

    NONE = "none"
    FLAGGED = "use_sliding_window"  # from layer max_window_layers on, where the flag is set
    EVERYWHERE = "sliding_window"  # in all layers, where it is a number
    BY_TYPE = "layer_types"  # in those of layer_types, else in all as above
    PATTERN = "sliding_window_pattern"  # as BY_TYPE, else in all but each sixth


def layer_kinds(
    raw: Mapping[str, Any], rule: Windows, num_layers: int, longest: int
) -> tuple[LayerKind, ...]:
    """Returns the layers of a config.json. A window of the `longest` sequence is ignored.

    Raises UnsupportedModel naming the member at fault.
    """
    window = _window(raw)
    kinds = []
    for layer_type in _layer_types(raw, rule, num_layers, window):
        is_local = layer_type == _SLIDING
        if is_local and window is None:
            raise UnsupportedModel("layer_types has sliding_attention, but sliding_window is null")
        reaches_all = window is None or window >= longest
        kinds.append(LayerKind(window if is_local and not reaches_all else None, is_local))
    return tuple(kinds)


def _window(raw: Mapping[str, Any]) -> int | None:
    value = raw.get("sliding_window", 4096)  # what transformers takes in all these families
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(
            f"sliding_window must be a whole number of at least 1, or null, got {value!r}"
        )
    return value


def _layer_types(
    raw: Mapping[str, Any], rule: Windows, num_layers: int, window: int | None
) -> list[str]:
    written = raw.get("layer_types")
    if written is not None:
        others = sorted({str(kind) for kind in written} - {_FULL, _SLIDING})
        if rule in (Windows.NONE, Windows.EVERYWHERE) and _SLIDING in written:
            others.append(_SLIDING)  # transformers' models of these families do not look at it
        if others:
            raise UnsupportedModel(f"layer_types {', '.join(others)} are not supported")
        if len(written) != num_layers:
            raise UnsupportedModel(
                f"layer_types has {len(written)} entries for {num_layers} layers"
            )
        if rule is not Windows.EVERYWHERE:
            return list(written)
    if rule is Windows.NONE or window is None:
        return [_FULL] * num_layers
    if rule is Windows.FLAGGED:
        first = _first_window_layer(raw, num_layers)
        return [_FULL] * first + [_SLIDING] * (num_layers - first)
    if rule is Windows.PATTERN:
        pattern = raw.get("sliding_window_pattern", 6)
        if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
            raise UnsupportedModel(
                f"sliding_window_pattern must be a whole number of at least 1, got {pattern!r}"
            )
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]
    return [_SLIDING] * num_layers


def _first_window_layer(raw: Mapping[str, Any], num_layers: int) -> int:
    flag, first = raw.get("use_sliding_window"), raw.get("max_window_layers", 28)
    if flag is not None and not isinstance(flag, bool):
        raise UnsupportedModel(f"use_sliding_window must be true or false, got {flag!r}")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise UnsupportedModel(
            f"max_window_layers must be a whole number of at least 0, got {first!r}"
        )
    return min(first, num_layers) if flag else num_layers

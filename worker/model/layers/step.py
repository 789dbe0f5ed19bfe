"""Step: what every layer of one forward pass needs besides its input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from worker.model.attention.base import AttentionBackend
from worker.model.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Step:
    """`backend` has been prepared for exactly these tokens; cos and sin are their positions',
    [num_tokens, 1, head_dim / 2]."""

    ops: Ops
    backend: AttentionBackend
    cos: Tensor
    sin: Tensor

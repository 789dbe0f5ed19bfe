"""Placement: where a module's parameters live and in which number format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Placement:
    """Allocates parameters without filling them: the loader writes every one."""

    device: torch.device
    dtype: torch.dtype

    def parameter(self, *shape: int) -> nn.Parameter:
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(data, requires_grad=False)

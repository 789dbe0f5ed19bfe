"""Copies between host and device that do not make the host wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The array on the device. For CUDA the copy goes through pinned memory, in stream order.

    torch keeps the pinned memory until the copy has happened.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host. From CUDA it is filled only after the stream has come this far."""
    if tensor.device.type != "cuda":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)

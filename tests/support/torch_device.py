"""The device that tensor tests run on: PENSTOCK_TEST_DEVICE, the CPU by default."""

from __future__ import annotations

import os

import torch


def torch_device() -> torch.device:
    """A concrete device ("cuda:0"); float32 stays float32 there."""
    device = torch.device(os.environ.get("PENSTOCK_TEST_DEVICE", "cpu"))
    if device.type != "cuda":
        torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for one another
        return device
    torch.set_float32_matmul_precision("highest")
    return torch.device("cuda", torch.cuda.current_device())

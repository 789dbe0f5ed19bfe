"""A worker without Triton draws by torch's operators, and says so."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from worker.model.sampling.logits import PenaltyTable
from worker.model.sampling.sampler import find_kernels


def test_where_triton_is_missing_there_are_no_kernels_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels = ("worker.model.cuda", "worker.model.sampling.cuda_kernels")
    for name in [name for name in sys.modules if name.startswith(kernels)]:
        monkeypatch.delitem(sys.modules, name)
    device = torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        found = find_kernels(8, frozenset(), device, PenaltyTable(8, 1, device), None)
    assert found is None
    assert "Triton cannot be imported" in caplog.text

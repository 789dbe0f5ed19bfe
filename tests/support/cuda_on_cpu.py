"""The CPU in the place of a CUDA device: a program for one runs, and computes what it would there.

Tensors for the device are the host's, kernels run in Triton's interpreter, and a graph is the
function itself, called again. Times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.triton_device import has_triton
from worker.model.cuda import graphs

T = TypeVar("T")
MEMORY = 1 << 30
_GENERATOR = torch.Generator
CARD = SimpleNamespace(
    multi_processor_count=8, name="a double", total_memory=MEMORY, major=9, minor=0
)


class CudaOnCpu(TorchFunctionMode):
    """While it lasts, what is for a CUDA device is on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function == Tensor.is_cuda.__get__:
            return True
        args = tuple(map(_on_cpu, args))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        name = getattr(function, "__name__", "")
        return args[0] if name in ("pin_memory", "cuda") else function(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_device else value


class _Event:
    def __init__(self, **options: object) -> None:
        self._at_s = 0.0

    def record(self, stream: object = None) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Has nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return max(1e-3, (end._at_s - self._at_s) * 1e3)


class Generator(_GENERATOR):
    def __new__(cls, device: object = None) -> torch.Generator:  # type: ignore[misc]
        return _GENERATOR()


class _Graph:
    """Of a program's own: what it captures has run, and a replay does nothing."""

    def replay(self) -> None:
        """Does nothing."""


class _Capture:
    """A `Capture` of worker.model.cuda.graphs: what is captured runs at each replay."""

    def __init__(self, device: torch.device, **options: object) -> None:
        """Takes any."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        return run

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        return 0


def set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts doubles in the place of what a CUDA build of torch has."""
    assert has_triton()
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda *_: CARD.name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: CARD,
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: SimpleNamespace(synchronize=lambda: None),
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": lambda graph: nullcontext(),
    }
    for name, double in cuda.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(graphs, "CudaCapture", _Capture)

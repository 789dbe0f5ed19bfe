"""FakeCuda: tensors in the host's memory that say they are on a CUDA device, and refuse to be read.

What makes the host wait for a real device raises Waits: a value that is read, a shape that depends
on values, a copy that is not from or to pinned memory or not told to go on, a synchronisation. So
does an operator of tensors of both sides, which CUDA refuses. Kernels of Triton do nothing, but
their tensors must be on the device.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from tests.support.graph_double import READ_BY_THE_HOST, writes
from worker.model.cuda import toolchain

CUDA = torch.device("cuda", 0)
RING = 3  # launches after which an event has surely happened

# By the names of functions and methods of torch: they look at values.
_READ_VALUES = {
    "__array__",
    "__bool__",
    "__contains__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "__repr__",
    "allclose",
    "argwhere",
    "bincount",
    "cpu",
    "equal",
    "item",
    "masked_select",
    "nonzero",
    "numpy",
    "tolist",
    "unique",
    "unique_consecutive",
}
_MADE_OF_OTHERS = "CompositeImplicitAutograd"
_MOVES = {"to", "cuda", "cpu", "copy_"}


class Waits(AssertionError):
    """The host would wait for the device."""


class OnDevice(Tensor):
    """Says that it is on a device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


class Pinned(Tensor):
    """Host memory that a device copies from and to by itself; what it is a view of is one too."""


class Registered:
    """Of torch.cuda.cudart: memory of the host that is pinned as it lies there."""

    sizes: ClassVar[dict[int, int]] = {}  # bytes, by address

    @classmethod
    def cudaHostRegister(cls, address: int, size: int, flags: int) -> int:
        cls.sizes[address] = size
        return 0

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:
        return 0 if cls.sizes.pop(address, None) else 1


class Event:
    """Of torch.cuda. During a launch only those of RING launches ago may be waited for."""

    now = 0  # launches
    is_launching = False

    def __init__(self, **options: object) -> None:
        self._recorded: int | None = None

    def record(self, stream: object = None) -> None:
        self._recorded = Event.now

    def synchronize(self) -> None:
        is_young = self._recorded is not None and Event.now - self._recorded < RING
        if Event.is_launching and is_young:
            raise Waits("an event of the last launches is waited for")

    def elapsed_time(self, end: Event) -> float:
        self.synchronize()
        end.synchronize()
        return 1.0


@dataclass(frozen=True)
class Launched:
    """What a launch gives the device to do."""

    newest: ClassVar[Launched]

    kernels: list[str] = field(default_factory=list)  # of Triton
    operators: list[str] = field(default_factory=list)
    to_device: list[Tensor] = field(default_factory=list)  # copies out of the host's memory
    to_host: list[Tensor] = field(default_factory=list)


Launched.newest = Launched()  # of what is made before the first launch


class FakeCuda(TorchFunctionMode):
    """While it lasts, tensors made for a CUDA device are OnDevice."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        if name in _MOVES and tensors:
            return _moved(name, function, args, kwargs)
        if name == "pin_memory":
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                return args[0].clone().as_subclass(Pinned)
        if there:
            _refuse_reads(name, args)
            _refuse_the_host(name, tensors)
        if kwargs.pop("pin_memory", False):
            return function(*args, **kwargs).as_subclass(Pinned)
        is_for_device = _is_cuda(kwargs.get("device"))
        if is_for_device:
            kwargs["device"] = "cpu"
            if name in ("tensor", "as_tensor", "asarray"):
                raise Waits(f"torch.{name} copies from memory that is not pinned")
            if name == "Generator":
                return function(**kwargs)
        result = function(*args, **kwargs)
        if (is_for_device and name == "empty") or name == "empty_like":
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                result.zero_()  # what no kernel writes here is read by operators
        if there or is_for_device:
            return pytree.tree_map_only(Tensor, _on_device, result)
        return result


def _on_device(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, OnDevice | Pinned) else tensor.as_subclass(OnDevice)


def _is_cuda(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"  # type: ignore[call-overload]


def _refuse_reads(name: str, args: Any) -> None:
    if name in _READ_VALUES:
        raise Waits(f"{name} reads a tensor of the device")
    if name in ("__getitem__", "__setitem__"):
        indices = pytree.tree_leaves(args[1])
        if any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices):
            raise Waits("a mask of bools is an index: its shape depends on values")
        if any(isinstance(index, list) for index in (args[1], *_tuple(args[1]))):
            raise Waits("a list is an index: it is copied from memory that is not pinned")
    if name == "repeat_interleave" and isinstance(args[-1], Tensor):
        raise Waits("repeat_interleave: its shape depends on values")


def _tuple(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else ()


def _refuse_the_host(name: str, tensors: list[Tensor]) -> None:
    if any(not isinstance(t, OnDevice) and t.dim() for t in tensors):
        raise Waits(f"{name} of tensors on the device and on the host")


def _moved(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copies between host and device, or changes of dtype."""
    tensor = args[0]
    if name == "copy_":
        to, source = args[0], args[1]
        if isinstance(to, OnDevice) != isinstance(source, OnDevice):
            host = source if isinstance(to, OnDevice) else to
            _check_copy(host, kwargs)
            newest = Launched.newest
            (newest.to_device if isinstance(to, OnDevice) else newest.to_host).append(host)
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                return Tensor.copy_(to, source)
        return Tensor.copy_(to, source)
    places = [*args[1:], kwargs.pop("device", None)]
    devices = [p for p in places if isinstance(p, torch.device | str)] or (
        ["cuda" if name == "cuda" else "cpu"] if name in ("cuda", "cpu") else []
    )
    is_there = isinstance(tensor, OnDevice)
    goes_there = _is_cuda(devices[0]) if devices else is_there
    if is_there and not goes_there:
        raise Waits(f"{name} reads a tensor of the device")
    if goes_there and not is_there:
        _check_copy(tensor, kwargs)
        Launched.newest.to_device.append(tensor)
    kwargs.pop("non_blocking", None)
    others = [p for p in args[1:] if not isinstance(p, torch.device | str)]
    if name == "to" and (others or kwargs):
        result = function(tensor, *others, **kwargs)
    else:
        result = tensor.detach()
    if goes_there and not is_there:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            result = result.clone()
    return result.as_subclass(OnDevice) if goes_there else result


def _check_copy(host: Tensor, kwargs: dict[str, Any]) -> None:
    if not Event.is_launching:  # what is made beforehand may be waited for
        return
    is_pinned = host.untyped_storage().data_ptr() in Registered.sizes
    if not (is_pinned or isinstance(host, Pinned)):
        raise Waits("a copy from or to memory that is not pinned")
    if not kwargs.get("non_blocking"):
        raise Waits("a copy that is waited for")


class _Operators(TorchDispatchMode):
    """Refuses operators that read, also inside of others, and counts those that launch."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        has_mask = name in ("index", "index_put_") and any(
            isinstance(leaf, Tensor) and leaf.dtype is torch.bool
            for leaf in pytree.tree_leaves(args[1])
        )
        if name in READ_BY_THE_HOST or has_mask:
            raise Waits(f"{name} reads a tensor")
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), _MADE_OF_OTHERS):
            with self:
                return function.decompose(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if not name.startswith(("empty", "new_empty")) and writes(function, args, kwargs, result):
            Launched.newest.operators.append(name)
        return result


@contextmanager
def launching(*, goes_on: bool = False) -> Iterator[Launched]:
    """A launch of a step, or what goes on of the last one: nothing in it may wait."""
    Event.now += not goes_on
    Event.is_launching = True
    Launched.newest = Launched()
    try:
        with FakeCuda(), _Operators():
            yield Launched.newest
    finally:
        Event.is_launching = False


def set_up(
    monkeypatch: pytest.MonkeyPatch, draws: Callable[[str, tuple[Any, ...]], None]
) -> list[str]:
    """Puts doubles in the place of what a CUDA build of torch has, and of Triton's interpreter.

    Returns the names of the kernels that are launched. `draws` gets a kernel's name and arguments
    and may write results.
    """
    kernels: list[str] = []

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        name = executor.fn.__name__
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not isinstance(value, OnDevice):
                raise Waits(f"{name} gets a tensor of the host")
        kernels.append(name)
        Launched.newest.kernels.append(name)
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            draws(name, args)

    def synchronize(*_: object) -> None:
        if Event.is_launching:
            raise Waits("the device is waited for")

    stream = types.SimpleNamespace(synchronize=synchronize, cuda_stream=0)
    card = types.SimpleNamespace(multi_processor_count=132, name="a double", major=9, minor=0)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(toolchain, "unavailable_reason", lambda device: None)  # it would be read
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Registered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    return kernels

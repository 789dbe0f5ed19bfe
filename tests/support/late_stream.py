"""LateStream: a CUDA device, in the host's memory, that computes as late as it may.

What is enqueued runs when the host waits for it: kernels in Triton's interpreter, operators, and
copies. So a copy to the device reads pinned memory that the host may have written again, and a copy
to the host has not arrived: its memory holds garbage. A wait that is missing shows in a result.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from tests.support.cuda_on_cpu import Generator
from tests.support.graph_double import READ_BY_THE_HOST, poison
from worker.model.cuda import toolchain

CUDA = torch.device("cuda", 0)
CARD = SimpleNamespace(multi_processor_count=2, name="a double", major=9, minor=0)
_READS = {"__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"}
_MADE_OF_OTHERS = "CompositeImplicitAutograd"


class LateStream(TorchFunctionMode):
    """While it lasts, tensors made for a CUDA device are its own."""

    def __init__(self) -> None:
        super().__init__()
        self._enqueued: list[Callable[[], object]] = []
        self._num_run = 0
        # By address. They are kept: no other memory gets their addresses.
        self._there: dict[int, torch.UntypedStorage] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._registered: dict[int, int] = {}  # bytes, by address
        self._operators = _Operators(self)

    def __enter__(self) -> LateStream:
        self._operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._operators.__exit__(*exc)

    @property
    def num_enqueued(self) -> int:
        return len(self._enqueued)

    def enqueue(self, call: Callable[[], object]) -> None:
        self._enqueued.append(call)

    def run(self, until: int | None = None) -> None:
        """Runs what is enqueued, or the first `until`."""
        end = len(self._enqueued) if until is None else until
        with _disable_current_modes(), torch.inference_mode():  # type: ignore[no-untyped-call]
            while self._num_run < end:
                self._num_run += 1
                self._enqueued[self._num_run - 1]()

    def is_there(self, tensor: object) -> bool:
        return _is_in(self._there, tensor)

    def is_pinned(self, tensor: object) -> bool:
        return _is_in(self._pinned, tensor) or _is_in(self._registered, tensor)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self._registered.pop(address, None) else 1

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, whose memory is the device's from now on."""
        return _put(self._there, tensor)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if function == Tensor.is_cuda.__get__:
            return self.is_there(args[0])
        if function == Tensor.device.__get__ and self.is_there(args[0]):
            return CUDA
        if name == "pin_memory":
            return args[0] if self.is_pinned(args[0]) else _put(self._pinned, args[0].clone())
        if name in ("to", "cuda"):
            return self._moved(name, function, args, kwargs)
        if name in _READS and self.is_there(args[0]):
            self.run()
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                return args[0].clone() if name == "cpu" else function(*args, **kwargs)
        is_pinned, is_for_device = kwargs.pop("pin_memory", False), _is_cuda(kwargs.get("device"))
        if is_for_device:
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if not is_for_device and not is_pinned:
            return result
        if name == "empty":
            poison(result)
        return _put(self._pinned if is_pinned else self._there, result)

    def _moved(self, name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, goes_there = args[0], name == "cuda"
        places = [*args[1:], kwargs.pop("device", None)]
        devices = [place for place in places if isinstance(place, torch.device | str)]
        if devices:
            goes_there = _is_cuda(devices[0])
        elif name == "to":
            goes_there = self.is_there(tensor)
        others = [place for place in args[1:] if not isinstance(place, torch.device | str)]
        is_late = kwargs.pop("non_blocking", False)
        is_there = self.is_there(tensor)
        if is_there and not goes_there:
            self.run()
            with _disable_current_modes():  # type: ignore[no-untyped-call]
                tensor = tensor.clone()
        if others or kwargs:
            tensor = function(tensor, *others, **kwargs)
        if is_there or not goes_there:
            return tensor
        return self.own(poison(torch.empty_like(tensor))).copy_(tensor, non_blocking=is_late)


class _Operators(TorchDispatchMode):
    """Enqueues operators over the device's tensors."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stream, kwargs = self._stream, kwargs or {}
        name = function.overloadpacket.__name__
        if not any(map(stream.is_there, pytree.tree_leaves((args, kwargs)))):
            return function(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), _MADE_OF_OTHERS):
            with self:
                return function.decompose(*args, **kwargs)
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name in READ_BY_THE_HOST:
            stream.run()
            return function(*args, **kwargs)
        schema = function._schema
        if any(one.alias_info and not one.alias_info.is_write for one in schema.returns):
            return function(*args, **kwargs)  # a view
        written = [
            kwargs[one.name] if one.name in kwargs else args[number]
            for number, one in enumerate(schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        if written:
            stream.enqueue(lambda: function(*args, **kwargs))
            return written[0] if len(schema.returns) == 1 else tuple(written)
        result = pytree.tree_map_only(Tensor, self._like, _shapes(function, args, kwargs))
        if not name.startswith(("empty", "new_empty")):
            stream.enqueue(lambda: _fill(result, function(*args, **kwargs)))
        return result

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        stream = self._stream
        is_late = non_blocking and stream.is_pinned(to if stream.is_there(source) else source)
        is_between = stream.is_there(to) != stream.is_there(source)
        if is_between and not is_late:
            source = source if stream.is_there(source) else source.clone()
        stream.enqueue(lambda: to.copy_(source))
        if is_between and not is_late:
            stream.run()
        return to

    def _like(self, shape: Tensor) -> Tensor:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
            return self._stream.own(poison(made))


class Event:
    """Of torch.cuda, on the stream that a test has set up."""

    stream: LateStream

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.is_timed = enable_timing
        self._at = 0

    def record(self, stream: object = None) -> None:
        self._at = self.stream.num_enqueued

    def synchronize(self) -> None:
        self.stream.run(self._at)

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def set_up(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """Returns a stream, with doubles in the place of what a CUDA build of torch has."""
    stream, launch = LateStream(), interpreter.GridExecutor.__call__

    def enqueue(executor: Any, *args: Any, **kwargs: Any) -> None:
        stream.enqueue(lambda: launch(executor, *args, **kwargs))

    monkeypatch.setattr(Event, "stream", stream, raising=False)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", enqueue)
    monkeypatch.setattr(toolchain, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: CARD)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: stream.run())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stream)
    return stream


def _is_in(storages: Container[int], tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in storages


def _put(storages: dict[int, torch.UntypedStorage], tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if storage.nbytes():  # nothing has no address of its own
        storages[storage.data_ptr()] = storage
    return tensor


def _is_cuda(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"  # type: ignore[call-overload]


def _shapes(function: Any, args: Any, kwargs: Any) -> Any:
    """Returns the results of an operator without their values."""

    def shape_of(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    with _disable_current_modes():  # type: ignore[no-untyped-call]
        args, kwargs = pytree.tree_map_only(Tensor, shape_of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def _fill(results: Any, values: Any) -> None:
    for to, value in zip(pytree.tree_leaves(results), pytree.tree_leaves(values), strict=True):
        if isinstance(to, Tensor):
            to.copy_(value)

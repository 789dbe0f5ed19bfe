"""GraphDouble: what a CUDA graph does to a function, on the CPU.

A graph replays kernels over the addresses that it was captured with. The double records operators,
and kernels in Triton's interpreter, with the tensors that they read and wrote, and replays those: a
tensor that the caller has replaced is not seen, and what the host would have to look at is refused.
Memory that is allocated and not written is NaN, each time. Graphs of one double share a pool of
memory: a replay overwrites all that the others allocated, their results among it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

READ_BY_THE_HOST = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_dim",
}
# Methods of tensors that do the same: in inference mode operators do not show them all.
_READING_METHODS = {"__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"}


_GARBAGE = -77  # no token, block, slot or length

T = TypeVar("T")


class NotCapturable(RuntimeError):
    """An operator whose result the host waits for."""


class GraphDouble:
    """A `Capture` of worker.model.cuda.graphs."""

    def __init__(self, fastest: int = 0) -> None:
        """`fastest` is what it says of functions that it is to compare."""
        self._fastest = fastest
        self.launches: list[list[str]] = []  # of each captured function: kernels and operators
        self._pool: list[list[Tensor]] = []  # of each captured function: what it allocates

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        return min(self._fastest, len(replays) - 1)

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        """Captures `run`. Raises NotCapturable."""
        recorder = _Recorder()
        launch = interpreter.GridExecutor.__call__

        def recorded_launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            with recorder.paused():
                launch(executor, *args, **kwargs)
            recorder.calls.append(lambda: launch(executor, *args, **kwargs))
            recorder.launches.append(executor.fn.__name__)

        interpreter.GridExecutor.__call__ = recorded_launch
        try:
            with recorder, _Reads(recorder):
                result = run()
        finally:
            interpreter.GridExecutor.__call__ = launch
        calls, memory = recorder.calls, recorder.memory
        self.launches.append(recorder.launches)
        self._pool.append(memory)

        def replay() -> T:
            with torch.inference_mode():
                for of_graph in self._pool:
                    if of_graph is not memory:
                        for tensor in of_graph:
                            poison(tensor)
                for call in calls:
                    call()
            return result

        return replay


class _Recorder(TorchDispatchMode):
    """Runs operators and keeps them, with the memory of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.launches: list[str] = []
        self.memory: list[Tensor] = []
        self.is_paused = False

    def paused(self) -> _Pause:
        return _Pause(self)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self.is_paused:
            return result
        name = function.overloadpacket.__name__
        has_mask = name in ("index", "index_put_") and any(
            isinstance(leaf, Tensor) and leaf.dtype is torch.bool
            for leaf in pytree.tree_leaves(args[1])
        )
        if name in READ_BY_THE_HOST or has_mask:
            raise NotCapturable(name)
        self.memory += new_tensors(args, kwargs, result)
        if name.startswith(("empty", "new_empty")):
            self.calls.append(lambda: poison(result))
            return poison(result)
        self.calls.append(lambda: _again(function, args, kwargs, result))
        if writes(function, args, kwargs, result):
            self.launches.append(name)
        return result


class _Reads(TorchFunctionMode):
    """Refuses methods by which the host reads tensors."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READING_METHODS and not self._recorder.is_paused:
            raise NotCapturable(name)
        return function(*args, **(kwargs or {}))


class _Pause:
    """While it lasts, operators are not kept: those of the interpreter itself."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.is_paused = True

    def __exit__(self, *exc: object) -> None:
        self._recorder.is_paused = False


def writes(function: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Returns whether an operator wrote memory, which takes a launch; views do not."""
    returns = [one.alias_info for one in function._schema.returns]
    return any(alias and alias.is_write for alias in returns) or bool(
        new_tensors(args, kwargs, result)
    )


def new_tensors(args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """Returns the results of an operator that are in memory of their own."""
    known = {_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)}
    results = [leaf for leaf in pytree.tree_leaves(result) if _is_tensor(leaf)]
    return [leaf for leaf in results if _memory(leaf) not in known]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def poison(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.nan if tensor.is_floating_point() else _GARBAGE)


def _again(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Computes once more, into the memory of `result`."""
    new = function(*args, **kwargs)
    for old, fresh in zip(pytree.tree_leaves(result), pytree.tree_leaves(new), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != fresh.data_ptr():
            old.copy_(fresh)

"""Where Triton's kernels can run in tests: on a CUDA device, or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from tests.support.torch_device import torch_device

NO_TRITON = "kernels run with TRITON_INTERPRET=1, or with PENSTOCK_TEST_DEVICE=cuda"
NOT_INTERPRETED = "needs Triton's interpreter: TRITON_INTERPRET=1"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def has_triton() -> bool:
    """Returns whether kernels run here. The interpreter is mended first."""
    if importlib.util.find_spec("triton") is None:
        return False
    if IS_INTERPRETED:
        widen_bfloat16_operands()
        round_to_fp8()
        patch_once()
        keep_shapes()
        check_overflow()
        check_addresses()
        return True
    return torch_device().type == "cuda"


def widen_bfloat16_operands() -> None:
    """Makes the interpreter's `tl.dot` right for bfloat16, whose bits it multiplies as integers.

    See triton-lang/triton#11584. A test fails where this is no longer needed.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot
    if getattr(create_dot, "widens", False):
        return

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_widened_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    create_widened_dot.widens = True  # type: ignore[attr-defined]
    builder.create_dot = create_widened_dot


def multiply_in_order(monkeypatch: Any) -> None:
    """Makes the interpreter's `tl.dot` sum each number of a product in the same order, as a GPU
    does: numpy's order depends on where in the operand a row is."""
    if not IS_INTERPRETED:
        return
    import numpy as np

    def in_order(left: Any, right: Any, dtype: Any = None) -> Any:
        return np.einsum("ik,kj->ij", left, right, dtype=dtype)

    monkeypatch.setattr(np, "matmul", in_order)


def round_to_fp8() -> None:
    """Makes the interpreter round float32 to e4m3 as GPUs do: to the nearest, ties to even, with a
    carry into the exponent. A test fails where this is no longer needed."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    create_fp_to_fp = builder.create_fp_to_fp
    if getattr(create_fp_to_fp, "rounds", False):
        return

    def create_rounded(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        if source.dtype.scalar != tl.float32 or to.scalar != tl.float8e4nv:
            return create_fp_to_fp(self, source, to, rounding)
        wide = torch.tensor(source.data)
        values = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), tl.float8e4nv)

    create_rounded.rounds = True  # type: ignore[attr-defined]
    builder.create_fp_to_fp = create_rounded


def patch_once() -> None:
    """Leaves out what the interpreter repeats, which is more than half of its time.

    At each call of one kernel's function by another it looks through its whole language again, and
    finds nothing to change. It looks types up in a table that it makes anew, and broadcasts
    operands of one shape to that shape.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    original, found = interpreter._patch_lang, interpreter._get_np_dtype
    broadcast = TritonSemantic.broadcast_impl_value
    if getattr(original, "is_once", False):
        return
    by_name: dict[str, Any] = {}

    def patch(fn: Any) -> Any:
        modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        if all(not tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return original(fn)

    def get_np_dtype(type_: Any) -> Any:
        scalar = type_.scalar
        if scalar.name not in by_name:
            by_name[scalar.name] = found(scalar)
        return by_name[scalar.name]

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = (one.type.shape.values if one.type.is_block() else () for one in (lhs, rhs))
        return (lhs, rhs) if left == right else broadcast(self, lhs, rhs)

    patch.is_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
    interpreter._get_np_dtype = get_np_dtype
    TritonSemantic.broadcast_impl_value = broadcast_others


def keep_shapes() -> None:
    """Makes the interpreter keep the shapes of types and tensors, and call its language directly.

    Each result has a type and a tensor, whose shapes it makes of one object for each size: a third
    of its time.
    """
    import triton.language.core as core
    from triton.runtime import interpreter

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    if getattr(make_type, "keeps", False):
        return
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = (self.shape, self.numel, str(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, name = of_types[sizes]
        self.name = f"<{name}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # a keyword of its callers
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[sizes] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sizes]

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **arguments: Any) -> Any:
            arguments["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **arguments)

        scope.set_attr(obj, name, call)

    init_type.keeps = True  # type: ignore[attr-defined]
    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
    interpreter._patch_attr = patch_attr


def check_overflow() -> None:
    """Makes the interpreter raise where a sum or product of integers overflows.

    Its own check runs six operators of its language for each, a third of the time, and asserts
    nothing without `debug`.
    """
    import numpy as np
    from triton.language.semantic import TritonSemantic

    operators = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64:
            return
        wide = operators[binary_op.__name__](
            lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64)
        )
        is_inside = (wide >= scalar.get_int_min_value()) & (wide <= scalar.get_int_max_value())
        assert is_inside.all(), f"{scalar} overflow detected for operation {binary_op.__name__}"

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def check_addresses() -> None:
    """Makes the interpreter raise IndexError where a kernel reads or writes outside of the memory
    of its arguments: on a GPU that ends the process, or changes what belongs to others."""
    import numpy as np
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    copied_arguments = executor._init_args_hst
    if getattr(copied_arguments, "records", False):
        return
    ranges: list[np.ndarray[Any, Any]] = [np.zeros((0, 2), dtype=np.uint64)]

    def recording(self: Any, *args: Any) -> Any:
        positional, by_name = copied_arguments(self, *args)
        tensors = [a for a in (*positional, *by_name.values()) if hasattr(a, "untyped_storage")]
        storages = [tensor.untyped_storage() for tensor in tensors]
        found = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
        ranges[0] = np.array(found, dtype=np.uint64).reshape(-1, 2)
        return positional, by_name

    def check(pointers: Any, mask: Any) -> None:
        addresses = pointers.data[mask.data.astype(bool)][:, None].astype(np.uint64)
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        starts, ends = ranges[0].T
        inside = (addresses >= starts) & (addresses + size <= ends)
        if not inside.any(axis=1).all():
            raise IndexError("a kernel reads or writes outside of its arguments")

    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    recording.records = True  # type: ignore[attr-defined]
    executor._init_args_hst = recording
    builder.create_masked_load = checked_load
    builder.create_masked_store = checked_store

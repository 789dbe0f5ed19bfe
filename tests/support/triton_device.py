"""Where Triton's kernels can run in tests: on a CUDA device, or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from tests.support.torch_device import torch_device

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def has_triton() -> bool:
    """Returns whether kernels run here. The interpreter is mended first."""
    if importlib.util.find_spec("triton") is None:
        return False
    if IS_INTERPRETED:
        widen_bfloat16_operands()
        patch_once()
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


def patch_once() -> None:
    """Leaves out what the interpreter repeats at each call of one kernel's function by another.

    It looks through its whole language again, and finds nothing to change: half of the time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if getattr(original, "is_once", False):
        return

    def patch(fn: Any) -> Any:
        modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        if all(not tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return original(fn)

    patch.is_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch

"""Triton's interpreter, which runs kernels on the host's tensors under TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what the interpreter repeats at each call of one kernel's function by another.

    It looks through its whole language again, and finds nothing to change: half of the time.
    """
    original = interpreter._patch_lang

    def patch(fn: Any) -> Any:
        modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        if all(not tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return original(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", patch)

"""The check at load: does a tier's product give what the specification gives?"""

from __future__ import annotations

import torch

from worker.model.layers.ops import Ops

_SAMPLE = (3, 64, 48)  # rows, in, out: odd enough to notice a wrong layout
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


@torch.inference_mode()
def what_is_wrong(ops: Ops, like: Ops, dtype: torch.dtype) -> str | None:
    """Why `ops` cannot be used here: its products differ from those of `like`, or do not exist.

    Private operators may vanish or change with any release of torch; none of that is an error.
    """
    rows, size_in, size_out = _SAMPLE
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size_out, size_in, generator=generator).to(dtype)
    bias = torch.randn(size_out, generator=generator).to(dtype)
    x = torch.randn(rows, size_in, generator=generator).to(dtype)
    try:
        found = ops.linear(weight, bias)(x)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    expected = like.linear(weight, bias)(x)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"a product has shape {list(found.shape)} and type {found.dtype}"
    error_size = (found.float() - expected.float()).norm() / expected.float().norm()
    if not error_size <= _TOLERANCE.get(dtype, 1e-2):
        return f"products are off by {error_size:.2%}"
    return None

"""The compiled kernels as Python functions over addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

# ctypes must find torch's libgomp in the process already: it comes with this import, and the
# kernels then share its threads (torch.set_num_threads rules both).
import torch  # noqa: F401

from worker.model.errors import TierUnavailable

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear_bf16": (_P, _P, _P, _P, _P, _N, _N, _N, _I),
    "linear_int8": (_P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _I),
    "add_rms_norm": (_P, _P, _P, _P, _F, _N, _N),
    "norm_rope": (_P, _N, _P, _P, _F, _P, _P, _N, _N, _N, _N),
    "kv_store": (_P, _P, _N, _N, _P, _P, _N, _P, _N, _N, _N),
    "paged_attention": (*(_P, _N, _P, _P, _N, _P, _P, _P, _P, _N, _P, _N, _N, _N, _N, _F),),
}

# Query rows that one item of paged_attention's work list covers, and tokens in a block: constants
# of kernels.cpp.
ATTENTION_ROWS = 8
ATTENTION_BLOCK = 16

Kernel = Callable[..., None]


class NativeKernels:
    """kernels.cpp's functions, which say there what they expect. An address of None is null.

    Nothing is checked and no reference is held: the callers keep their tensors alive, contiguous
    and of the right size until the call returns. The GIL is released during a call.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            functions = {name: getattr(library, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise TierUnavailable(f"{path} cannot be loaded: {error}") from error
        for name, function in functions.items():
            function.argtypes = _SIGNATURES[name]
            function.restype = None
        self.linear_bf16: Kernel = functions["linear_bf16"]
        self.linear_int8: Kernel = functions["linear_int8"]
        self.add_rms_norm: Kernel = functions["add_rms_norm"]
        self.norm_rope: Kernel = functions["norm_rope"]
        self.kv_store: Kernel = functions["kv_store"]
        self.paged_attention: Kernel = functions["paged_attention"]

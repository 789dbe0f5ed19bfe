"""The compiled kernels as Python functions over addresses."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from worker.model.errors import TierUnavailable

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Weight(ctypes.Structure):
    """A packed weight; `scales` and `offset` are an int8 one's. `amx_rows`: see Choice."""

    _fields_ = (
        ("packed", _P),
        ("bias", _P),
        ("scales", _P),
        ("offset", _P),
        ("n", _N),
        ("k", _N),
        ("gated", _N),
        ("amx_rows", _N),
    )


class Scratch(ctypes.Structure):
    """Room for a product's rows as it reads them, and for their scales."""

    _fields_ = (("rows", _P), ("row_scales", _P))


class Ragged(ctypes.Structure):
    """Whose queries and keys are where, and the attention's work list."""

    _fields_ = (
        ("sequences", _N),
        ("cu_q", _P),
        ("seq_lens", _P),
        ("table", _P),
        ("table_stride", _N),
        ("work", _P),
        ("num_work", _N),
    )


class Layer(ctypes.Structure):
    """One layer's parameters and its part of the KV cache."""

    _fields_ = (
        ("attention_norm", _P),
        ("mlp_norm", _P),
        ("query_norm", _P),
        ("key_norm", _P),
        ("qkv", Weight),
        ("output", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("keys", _P),
        ("values", _P),
    )


class Stack(ctypes.Structure):
    """All layers, with what is before and behind them."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("num_layers", _N),
        ("hidden", _N),
        ("heads", _N),
        ("kv_heads", _N),
        ("dim", _N),
        ("block_stride", _N),
        ("embedding", _P),
        ("final_norm", _P),
        ("cosines", _P),
        ("sines", _P),
        ("norm_eps", _F),
        ("attention_scale", _F),
    )


class Batch(ctypes.Structure):
    """One step's tokens, and the buffers for their activations."""

    _fields_ = (
        ("tokens", _N),
        ("ids", _P),
        ("positions", _P),
        ("slots", _P),
        ("ragged", Ragged),
        ("rows", _P),
        ("num_rows", _N),
        ("ragged_rows", Ragged),
        ("x", _P),
        ("normed", _P),
        ("qkv", _P),
        ("attended", _P),
        ("inner", _P),
        ("delta", _P),
        ("scratch", Scratch),
    )


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (ctypes.POINTER(Weight), _P, ctypes.POINTER(Scratch), _P, _N),
    "add_rms_norm": (_P, _P, _P, _P, _F, _N, _N),
    "norm_rope": (_P, _N, _P, _P, _F, _P, _P, _N, _N, _N, _N),
    "kv_store": (_P, _P, _N, _N, _P, _P, _N, _P, _N, _N, _N),
    "paged_attention": (_P, _N, _P, _P, _N, _P, ctypes.POINTER(Ragged), _N, _N, _N, _F),
    "decoder_stack": (ctypes.POINTER(Stack), ctypes.POINTER(Batch)),
    "set_num_threads": (_N,),
    "settle": (),
}

# Query rows that one item of paged_attention's work list covers, and tokens in a block: constants
# of kernels.cpp.
ATTENTION_ROWS = 8
ATTENTION_BLOCK = 16

Kernel = Callable[..., None]


class NativeKernels:
    """The functions of kernels.cpp, documented there. An address of None is null.

    Nothing is checked and no reference is held: the callers keep their tensors alive, contiguous
    and of the right size until the call returns. Those that lie behind a Weight, a Stack, a Scratch
    or a Batch's buffers stay until `settle` has returned: a thread that lost its core may still
    read them. The GIL is released during a call.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            functions = {name: getattr(library, name) for name in _SIGNATURES}
            permit = library.amx_is_usable
        except (OSError, AttributeError) as error:
            raise TierUnavailable(f"{path} cannot be loaded: {error}") from error
        for name, function in functions.items():
            function.argtypes = _SIGNATURES[name]
            function.restype = None
        permit.argtypes, permit.restype = (), ctypes.c_int
        self._amx_is_usable = permit
        self.linear: Kernel = functions["linear"]
        self.add_rms_norm: Kernel = functions["add_rms_norm"]
        self.norm_rope: Kernel = functions["norm_rope"]
        self.kv_store: Kernel = functions["kv_store"]
        self.paged_attention: Kernel = functions["paged_attention"]
        self.decoder_stack: Kernel = functions["decoder_stack"]
        self.set_num_threads: Kernel = functions["set_num_threads"]
        self.settle: Kernel = functions["settle"]

    def amx_is_usable(self) -> bool:
        """Returns whether a weight's `amx_rows` may be set: built for AMX, and permitted."""
        return bool(self._amx_is_usable())


_PIECE_BYTES = 64 << 20
_ALIGNMENT = 64  # of every tensor: a cache line


class HugePages:
    """Copies of tensors, one after the other in large pieces of memory.

    Without an allocation of its own, a weight of a few MiB would lie in ordinary pages. A piece
    is given back when the last tensor in it is gone. On the CPU only.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy of the same shape and dtype, aligned to 64 bytes."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > self._piece.numel():
            self._piece = huge_page_memory(max(size, _PIECE_BYTES))
            self._used = 0
        place = self._piece[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def huge_page_memory(size: int) -> Tensor:
    """Returns `size` bytes of zeros, [size] uint8, which the kernel may back with huge pages.

    They take memory as they are written. Raises OSError where the system lacks the memory.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them: ordinary pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

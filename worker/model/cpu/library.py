"""The compiled kernels: built once for this CPU, then called as functions over addresses."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from worker.cache import cache_directory
from worker.model.base import Activation
from worker.model.errors import TierUnavailable

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Weight(ctypes.Structure):
    """A packed weight; an int8 one, also one in four bits, has `scales`, `offset` and `factors`.
    `amx_rows`: see Choice."""

    _fields_ = (
        ("packed", _P),
        ("bias", _P),
        ("scales", _P),
        ("offset", _P),
        ("factors", _P),
        ("n", _N),
        ("k", _N),
        ("gate", _N),
        ("amx_rows", _N),
        ("is_int4", _N),
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
        ("groups", _N),
        ("group_stride", _N),
        ("work", _P),
        ("num_work", _N),
    )


class Layer(ctypes.Structure):
    """One layer's parameters and its part of the KV cache."""

    _fields_ = (
        ("attention_norm", _P),
        ("attention_output_norm", _P),
        ("mlp_norm", _P),
        ("mlp_output_norm", _P),
        ("query_norm", _P),
        ("key_norm", _P),
        ("qkv", Weight),
        ("output", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("keys", _P),
        ("values", _P),
        ("cosines", _P),
        ("sines", _P),
        ("window", _N),
        ("group", _N),
    )


class Stack(ctypes.Structure):
    """All layers, with the operators before and after them."""

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
        ("embedding_scale", _F),
        ("norm_offset", _F),
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
    "add_rms_norm": (_P, _P, _P, _P, _F, _P, _F, _N, _N),
    "norm_rope": (_P, _N, _P, _P, _F, _F, _P, _P, _N, _N, _N, _N),
    "kv_store": (_P, _P, _N, _N, _P, _P, _N, _P, _N, _N, _N),
    "paged_attention": (_P, _N, _P, _P, _N, _P, ctypes.POINTER(Ragged), *[_N] * 4, _F, _N),
    "decoder_stack": (ctypes.POINTER(Stack), ctypes.POINTER(Batch)),
    "set_num_threads": (_N,),
    "settle": (),
}

# Query rows that one item of paged_attention's work list covers, tokens in a block, and names:
# constants of kernels.cpp.
ATTENTION_ROWS = 8
NO_WINDOW = 0
NO_GATE = 0
GATES: Mapping[Activation, int] = {"silu": 1, "gelu_tanh": 2}  # of a Weight
ATTENTION_BLOCK = 16

Kernel = Callable[..., None]


class NativeKernels:
    """The functions of kernels.cpp, documented there. An address of None is null.

    Nothing is checked and no reference is held: the callers keep their tensors alive, contiguous
    and of the right size until the call returns. Those that a Weight, a Stack, a Scratch
    or a Batch points to stay until `settle` has returned: a thread that lost its core may still
    read them. The GIL is released during a call.
    """

    def __init__(self, path: Path) -> None:
        """Raises TierUnavailable for a library that cannot be loaded."""
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


logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-pthread",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
    # GCC takes its own intrinsics' undefined lanes for our mistake, at length.
    "-Wno-maybe-uninitialized",
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_TIMEOUT_S = 300


def cpu_flags(features: frozenset[str]) -> tuple[str, ...]:
    """Returns the compiler's flags for a CPU with these features, spelt as in /proc/cpuinfo.

    Raises TierUnavailable for a CPU with less than AVX2 and FMA, or than NEON on 64 bits.
    """
    if "asimd" in features:
        extras = [f"+{name}" for name in ("bf16", "i8mm") if name in features]
        return ("".join(("-march=", "armv8.2-a" if extras else "armv8-a", *extras)),)
    if not {"avx2", "fma"} <= features:
        raise TierUnavailable("the CPU lacks AVX2 or FMA, and is no ARM with NEON")
    flags: tuple[str, ...] = _AVX2
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= features:
        flags += _AVX512
        if "avx512_bf16" in features:
            flags += ("-mavx512bf16",)
        if "avx512_vnni" in features:
            flags += ("-mavx512vnni",)
        if features >= _AMX:
            flags += ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
    return flags


def build_for(
    features: frozenset[str], compiling: Callable[[float], None] = lambda share: None
) -> Path:
    """Returns the library for a CPU with these features; without AMX where the compiler does not
    know it, as GCC before 11. `compiling` as `build` has it. Raises TierUnavailable."""
    try:
        return build(cpu_flags(features), compiling)
    except TierUnavailable:
        if not features >= _AMX:
            raise
    return build(cpu_flags(features - _AMX), compiling)


def build(flags: tuple[str, ...], compiling: Callable[[float], None] = lambda share: None) -> Path:
    """Returns the shared library for these CPU flags, from the cache or compiled into it (seconds).

    Safe for several processes at once: each writes a file of its own, and the last rename wins
    with the same contents. `compiling` gets 0 before the compiler runs and 1 after it. Raises
    TierUnavailable without a compiler or when it fails.
    """
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise TierUnavailable("there is no C++ compiler (g++, or what CXX names)")
    version = _run([compiler, "--version"])
    headers = sorted(SOURCE.parent.glob("*.h"))
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, *headers)]
    parts = (*sources, version, *_FLAGS, *flags)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    directory = cache_directory()
    if directory is None:
        raise TierUnavailable("there is no cache directory to build in; set XDG_CACHE_HOME")
    library = directory / f"kernels-{digest}.so"
    if library.exists():
        return library
    handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=directory)
    os.close(handle)
    partial = Path(name)
    logger.info("compiling the CPU kernels for this processor (once, about ten seconds)")
    compiling(0.0)
    try:
        _run([compiler, *_FLAGS, *flags, str(SOURCE), "-o", str(partial)])
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)
    compiling(1.0)
    logger.info("compiled the CPU kernels to %s with %s", library, " ".join(flags))
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TierUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        logger.warning("the CPU kernels did not compile: %s", done.stderr[-2000:])
        raise TierUnavailable(f"{command[0]} failed with status {done.returncode}")
    return done.stdout

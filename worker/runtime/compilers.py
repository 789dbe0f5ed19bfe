"""The compilers that an engine process runs: their caches, and whether one is running now."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from worker.cache import cache_directory

# Directories by the variable that names them. By default two of them are in the temporary
# directory, which ends with the engine process.
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}
# As the kernel shows them: at most 15 characters.
_NAMES = frozenset(
    {
        *("g++", "gcc", "c++", "cc", "cc1", "cc1plus", "collect2", "as", "ld", "clang", "clang++"),
        *("nvcc", "cicc", "cudafe++", "ptxas", "fatbinary", "hipcc", "ninja"),
    }
)
_PROC = Path("/proc")


def compiler_caches(vllm_version: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that keep compiled code of this release of vLLM for the next start.

    The directories are the user's own. Variables that `env` has are left out, and all of them where
    no directory can be written.
    """
    directory = cache_directory()
    if directory is None:
        return {}
    base = directory / f"vllm-{vllm_version or 'unknown'}"
    return {name: str(base / folder) for name, folder in _CACHES.items() if name not in env}


def kernel_cache(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that keeps our own engine's Triton kernels for the next start, as
    `compiler_caches` does: Triton's default is a directory of the home, which may be read-only."""
    directory = cache_directory()
    if directory is None or "TRITON_CACHE_DIR" in env:
        return {}
    return {"TRITON_CACHE_DIR": str(directory / _CACHES["TRITON_CACHE_DIR"])}


def is_compiling(session_id: int) -> bool:
    """Returns whether a compiler runs in a session. False without /proc."""
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            head, _, fields = path.read_text(errors="replace").rpartition(")")
            name = head.partition("(")[2]
            if int(fields.split()[3]) == session_id and _is_compiler(name):
                return True
    return False


def _is_compiler(name: str) -> bool:
    # Also x86_64-linux-gn(u-g++): a name that is cut off.
    return name in _NAMES or name.rpartition("-")[2] in _NAMES or "-linux-gn" in name

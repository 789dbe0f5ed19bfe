"""The native kernels in every variant that this machine can both build and run."""

from __future__ import annotations

from functools import cache

from worker.model.cpu.library import NativeKernels, build, cpu_flags
from worker.model.cpu.processor import cpu_features

_VARIANTS = {
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}

NUM_THREADS = 3  # more than small machines have cores: late threads are no exception


def variants() -> list[str]:
    """Names for `kernels`; "best" is what a worker on this machine would use."""
    if not _VARIANTS["avx2"] <= cpu_features():
        return []
    return ["best", *(name for name, needs in _VARIANTS.items() if needs <= cpu_features())]


@cache
def kernels(variant: str) -> NativeKernels:
    """Compiled once (seconds), into the cache that workers use too."""
    features = cpu_features() if variant == "best" else _VARIANTS[variant]
    library = NativeKernels(build(cpu_flags(features)))
    library.set_num_threads(NUM_THREADS)
    return library

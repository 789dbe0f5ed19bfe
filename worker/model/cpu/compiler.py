"""Builds the kernels for this machine's CPU, once: the result is kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from worker.model.errors import TierUnavailable

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


def build_for(features: frozenset[str]) -> Path:
    """Returns the library for a CPU with these features; without AMX where the compiler does not
    know it, as GCC before 11. Raises TierUnavailable."""
    try:
        return build(cpu_flags(features))
    except TierUnavailable:
        if not features >= _AMX:
            raise
    return build(cpu_flags(features - _AMX))


def build(flags: tuple[str, ...]) -> Path:
    """Returns the shared library for these CPU flags, from the cache or compiled into it (seconds).

    Safe for several processes at once: each writes a file of its own, and the last rename wins
    with the same contents. Raises TierUnavailable without a compiler or when it fails.
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
    library = directory / f"kernels-{digest}.so"
    if library.exists():
        return library
    handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=directory)
    os.close(handle)
    partial = Path(name)
    try:
        _run([compiler, *_FLAGS, *flags, str(SOURCE), "-o", str(partial)])
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)
    logger.info("built the CPU kernels: library=%s flags=%s", library, " ".join(flags))
    return library


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/penstock or ~/.cache/penstock; else one of this user's own in the temporary
    directory. Others must not be able to put a library there. Raises TierUnavailable."""
    wanted = os.environ.get("XDG_CACHE_HOME")
    base = Path(wanted) if wanted else Path.home() / ".cache"
    for directory in (
        base / "penstock",
        Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}",
    ):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        status = directory.stat()
        is_ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if is_ours and os.access(directory, os.W_OK | os.X_OK):
            return directory
    raise TierUnavailable("there is no cache directory to build in; set XDG_CACHE_HOME")


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

"""Checks that Triton compiles and launches kernels on this machine, and names the missing part.

    python -m worker.model.cuda.toolchain

compiles a kernel for a GPU that need not be there. If a part is missing, it prints that and ends
with status 1: for images, whose kernels are first compiled elsewhere.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.nn import functional

# A C module, as Triton makes one to launch kernels, but for libcuda: that is there with a driver.
_MODULE = "penstock_probe"
_SOURCE = f"""
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{_MODULE}", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_{_MODULE}(void) {{ return PyModule_Create(&module); }}
"""
_ARCH = 80


@functools.cache
def unavailable_reason(device: torch.device) -> str | None:
    """Returns why kernels cannot run on the device, None where they can: compiles one and launches
    it. Raises the device's own errors, such as memory that is full, which may pass."""
    try:
        from worker.model.cuda.layers import gate
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    try:
        out = gate(torch.ones(1, 32, device=device), "silu")
        off = (out.cpu() - functional.silu(torch.ones(1, 16))).abs().max().item()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # of Triton, its compilers, the system or the driver
        return _explained(error)
    return None if off < 1e-3 else f"a first kernel computed a value that is off by {off:.2g}"


def compile_fault() -> str | None:
    """Returns why Triton cannot compile here, None where it can. Needs no device: compiles a kernel
    for another machine's, and with the C compiler a module, which it loads."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.build import compile_module_from_src

        from worker.model.cuda.kernels.layers import gate_kernel
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    constants = {"SIZE": 16, "BLOCK": 16, "IS_SILU": True}
    signature = {"both": "*fp32", "out": "*fp32", **dict.fromkeys(constants, "constexpr")}
    try:
        source = ASTSource(gate_kernel, signature, constants, {})
        triton.compile(source, target=GPUTarget("cuda", _ARCH, 32))
        compile_module_from_src(_SOURCE, _MODULE)
    except Exception as error:  # of Triton, its compilers or the system
        return _explained(error)
    return None


def _explained(error: Exception) -> str:
    """Returns a sentence with what this machine lacks, if that is seen, and the error itself."""
    first_line = (str(error).splitlines() or [""])[0][:200]
    given = f"{type(error).__name__}: {first_line}"
    lack = _cache_fault() or _compiler_fault()
    if lack is None:
        return f"Triton cannot compile and launch a kernel ({given})"
    return f"{lack} ({given})"


def _cache_fault() -> str | None:
    from triton import knobs

    directory = Path(knobs.cache.dir)
    named = f"Triton's cache of compiled kernels, {directory},"
    advice = "Set TRITON_CACHE_DIR to a directory"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        is_noexec = os.statvfs(directory).f_flag & os.ST_NOEXEC
    except OSError as error:
        return f"{named} cannot be written to: {error.strerror}. {advice} that can be"
    if is_noexec:
        return f"{named} is on a file system mounted noexec. {advice} that code is loaded from"
    return None


def _compiler_fault() -> str | None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    use = "with which Triton builds the code that launches kernels"
    if compiler is None:
        return f"There is no C compiler on PATH, {use}. apt-get install gcc, or set CC"
    if shutil.which(compiler) is None:
        return f"CC={compiler} is no program, {use}. Set CC to a C compiler"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.exists():
        return f"{header} is missing, {use}. apt-get install python3-dev"
    return None


def main() -> int:
    """Returns the exit status."""
    fault = compile_fault()
    sys.stdout.write(f"{fault or 'Triton compiles a kernel, and code that is loaded.'}\n")
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(main())

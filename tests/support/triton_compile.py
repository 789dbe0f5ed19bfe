"""Triton kernels compiled for GPUs that this machine lacks, and what the assembler says of them.

Under TRITON_INTERPRET=1, which makes every `@triton.jit` an interpreted function, a process of its
own compiles.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
_RESULTS = "results.json"


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one set of types and constants, for one GPU.

    `kernel` is "module:name". `signature` has the types of the arguments that are not constants:
    "*bf16", "i32", "fp32"; "i32:16" is a number that 16 divides, as pointers are.
    `arch` is "sm_90" or "gfx942".
    """

    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    arch: str = "sm_90"
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int  # of a thread
    spills: int  # bytes of stores and loads; on AMD's registers
    shared: int  # bytes
    ptx: str = field(repr=False)  # on AMD its assembly


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    fp_fusion: bool = True,
) -> Compiled:
    """Compiles a `@triton.jit` function that a module has at its top. Raises what Triton raises."""
    name = f"{fn.fn.__module__}:{fn.fn.__name__}"
    variant = Variant(name, signature, constexprs, arch, num_warps, num_stages, fp_fusion)
    return compile_variants([variant])[0]


def compile_variants(variants: Sequence[Variant]) -> list[Compiled]:
    """Compiles many in one process. Raises RuntimeError with what the first failure printed."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return [_compile(variant) for variant in variants]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-m", "tests.support.triton_compile", folder],
            input=json.dumps([dataclasses.asdict(variant) for variant in variants]),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if run.returncode != 0:
            raise RuntimeError(run.stderr)
        results = json.loads((Path(folder) / _RESULTS).read_text(encoding="utf-8"))
    return [Compiled(**result) for result in results]


def _compile(variant: Variant) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = variant.kernel.partition(":")
    fn = getattr(importlib.import_module(module), name)
    types = {name: kind.partition(":") for name, kind in variant.signature.items()}
    missing = set(fn.arg_names) - set(types) - set(variant.constexprs)
    assert not missing, f"{variant.kernel}: nothing said of {sorted(missing)}"
    signature = {name: types[name][0] if name in types else "constexpr" for name in fn.arg_names}
    attributes = {
        (fn.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, (kind, _, divisor) in types.items()
        if kind.startswith("*") or divisor == "16"
    }
    source = ASTSource(fn, signature, dict(variant.constexprs), attributes)
    if variant.arch.startswith("gfx"):
        target = GPUTarget("hip", variant.arch, 64)
    else:
        target = GPUTarget("cuda", int(variant.arch.removeprefix("sm_")), 32)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fp_fusion,
    }
    kernel = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        assembly = kernel.asm["amdgcn"]
        return Compiled(
            _number(r"\.vgpr_count:\s+(\d+)", assembly),
            _number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
            kernel.metadata.shared,
            assembly,
        )
    ptx = kernel.asm["ptx"]
    report = _assembler_report(ptx)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    assert spills, report
    return Compiled(
        _number(r"Used (\d+) registers", report), sum(spills), kernel.metadata.shared, ptx
    )


def _assembler_report(ptx: str) -> str:
    """Returns what Triton's own ptxas prints of the kernel, for the GPU that the text names."""
    target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    assert target is not None, ptx[:500]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        run = subprocess.run(
            [_assembler(target[1]), "-v", f"-arch={target[1]}", str(source), "-o", os.devnull],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert run.returncode == 0, run.stderr
    return run.stderr


def _assembler(arch: str) -> str:
    import triton.backends.nvidia

    # Triton brings a newer one for Blackwell (sm_100 and up).
    name = "ptxas-blackwell" if _number(r"sm_(\d+)", arch) >= 100 else "ptxas"
    return str(Path(triton.backends.nvidia.__file__).parent / "bin" / name)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in:\n{text[-2000:]}"
    return int(found[1])


def main() -> None:
    """Compiles the variants that standard input names and writes the results to a folder."""
    results = [dataclasses.asdict(_compile(Variant(**entry))) for entry in json.load(sys.stdin)]
    path = Path(sys.argv[1]) / _RESULTS
    path.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()

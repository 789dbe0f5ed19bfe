"""What the kernels are compiled for, by what the processor says it can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.model.cpu import processor as features
from worker.model.cpu.library import build_for, cpu_flags
from worker.model.cpu.processor import cpu_features
from worker.model.errors import TierUnavailable

AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
AMX = {"amx_tile", "amx_bf16", "amx_int8"}


def test_amx_is_compiled_for_where_all_of_it_is_there() -> None:
    assert "-mamx-tile" in cpu_flags(frozenset(AVX512 | AMX))
    assert not any("amx" in flag for flag in cpu_flags(frozenset(AVX512 | {"amx_tile"})))
    assert not any("amx" in flag for flag in cpu_flags(frozenset({"avx2", "fma"} | AMX)))


def test_a_compiler_that_does_not_know_amx_compiles_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "older-g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; --version) exit;; esac\n'
        'while [ $# -gt 1 ]; do shift; done\n: > "$1"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shares: list[float] = []
    library = build_for(frozenset(AVX512 | AMX), shares.append)
    assert shares == [0.0, 0.0, 1.0]  # the compiler is run twice
    assert library == build_for(frozenset(AVX512), shares.append)
    assert len(shares) == 3  # what is there is not compiled


def test_arm_is_compiled_for_what_it_has() -> None:
    assert cpu_flags(frozenset({"fp", "asimd"})) == ("-march=armv8-a",)
    assert cpu_flags(frozenset({"asimd", "i8mm", "bf16"})) == ("-march=armv8.2-a+bf16+i8mm",)


def test_a_processor_with_neither_has_no_kernels() -> None:
    with pytest.raises(TierUnavailable, match="AVX2"):
        cpu_flags(frozenset({"sse2", "fp"}))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 fma", {"fpu", "avx2", "fma"}),
        ("Features\t: fp asimd bf16", {"fp", "asimd", "bf16"}),
    ],
)
def test_features_are_read_on_x86_and_on_arm(
    line: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\nprocessor\t: 1\nflags\t: other\n")
    monkeypatch.setattr(features, "_CPUINFO", cpuinfo)
    assert cpu_features() == expected


def test_a_mac_with_apples_processor_is_detected_by_sysctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(features.sys, "platform", "darwin")
    monkeypatch.setattr(features.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(features, "_apple_has", lambda name: name == "i8mm")
    assert cpu_features() == {"asimd", "i8mm"}
    monkeypatch.setattr(features.platform, "machine", lambda: "x86_64")
    assert cpu_features() == frozenset()

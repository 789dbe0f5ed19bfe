"""The kernels on ARM: compiled for it, and run by an emulator beside plain loops."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from worker.model.cpu.library import SOURCE, cpu_flags

DRIVER = Path(__file__).parents[3] / "support" / "arm_kernels.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FEATURES = {
    "plain": frozenset({"fp", "asimd"}),
    "bf16-i8mm": frozenset({"fp", "asimd", "bf16", "i8mm"}),
}


@pytest.mark.arm
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_the_kernels_compute_on_arm_what_plain_loops_do(
    features: frozenset[str], tmp_path: Path
) -> None:
    assert shutil.which(COMPILER), f"no {COMPILER}: apt-get install g++-aarch64-linux-gnu"
    assert shutil.which(EMULATOR), f"no {EMULATOR}: apt-get install qemu-user"
    program = tmp_path / "arm_kernels"
    subprocess.run(
        [
            *(COMPILER, "-std=c++17", "-O1", "-pthread", "-static", "-Wno-maybe-uninitialized"),
            *cpu_flags(features),
            *(f"-I{SOURCE.parent}", str(DRIVER), "-o", str(program)),
        ],
        check=True,
        timeout=100,
    )
    done = subprocess.run(
        [EMULATOR, "-cpu", "max", str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "0 checks failed\n"
    assert done.returncode == 0

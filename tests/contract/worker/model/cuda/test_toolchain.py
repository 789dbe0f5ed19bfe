"""What Triton lacks on a machine is a sentence: what, where, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.support.torch_device import torch_device
from tests.support.triton_device import NO_TRITON, has_triton

pytest.importorskip("triton")

from worker.model.cuda import toolchain

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[5]


def checked(cache: Path, **changes: str) -> tuple[int, str]:
    """Returns exit status and output of the check in a process of its own, which compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), **changes}
    ended = subprocess.run(
        [sys.executable, "-m", toolchain.__name__],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout


def test_a_kernel_is_compiled_and_kept_where_nothing_is_missing(tmp_path: Path) -> None:
    status, output = checked(tmp_path / "triton")
    assert status == 0, output
    kept = {path.suffix for path in (tmp_path / "triton").rglob("*")}
    assert {".cubin", ".so"} <= kept


def test_no_compiler_is_named(tmp_path: Path) -> None:
    status, output = checked(tmp_path, PATH=str(tmp_path))
    assert status == 1
    assert "no C compiler on PATH" in output
    assert "apt-get install gcc, or set CC" in output
    status, output = checked(tmp_path, CC="/no/such/cc")
    assert status == 1
    assert "CC=/no/such/cc is no program" in output


def test_a_cache_that_cannot_be_written_is_named() -> None:
    status, output = checked(Path("/proc/triton"))
    assert status == 1
    assert "/proc/triton, cannot be written to" in output
    assert "Set TRITON_CACHE_DIR" in output


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/no/include"})
    said = toolchain._explained(RuntimeError("cc1 ended"))
    assert "/no/include/Python.h is missing" in said
    assert "apt-get install python3-dev (RuntimeError: cc1 ended)" in said


def test_a_cache_without_execution_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    mounted = os.statvfs(tmp_path)

    class NoExec:
        f_flag = mounted.f_flag | os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda _: NoExec)
    said = toolchain._explained(ImportError("failed to map segment from shared object"))
    assert f"{tmp_path}, is on a file system mounted noexec" in said


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_device_is_raised_and_is_not_kept(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.model.cuda import layers

    monkeypatch.setenv("PATH", "/nowhere")  # no compiler, which is not the reason
    monkeypatch.delenv("CC", raising=False)
    toolchain.unavailable_reason.cache_clear()
    monkeypatch.setattr(layers, "gate", failing := Failing(kind("CUDA error: full\nadvice")))
    device = torch.device("cpu")
    for times in (1, 2):
        with pytest.raises(kind, match="CUDA error: full"):
            toolchain.unavailable_reason(device)
        assert failing.times == times
    failing.error = RuntimeError("cc1 ended")
    for _ in range(2):
        assert "no C compiler" in (toolchain.unavailable_reason(device) or "")
        assert failing.times == 3
    toolchain.unavailable_reason.cache_clear()


class Failing:
    """Stands in for a kernel's launch."""

    def __init__(self, error: Exception) -> None:
        self.error, self.times = error, 0

    def __call__(self, both: torch.Tensor, activation: str) -> torch.Tensor:
        self.times += 1
        raise self.error


def test_a_first_kernel_is_launched_and_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_triton():
        pytest.skip(NO_TRITON)
    reason = toolchain.unavailable_reason.__wrapped__
    assert reason(torch_device()) is None
    from worker.model.cuda import layers

    monkeypatch.setattr(layers, "gate", lambda both, activation: both[:, 16:] * 2)
    assert "is off by 1.3" in (reason(torch_device()) or "")

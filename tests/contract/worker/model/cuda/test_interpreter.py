"""What tests mend in Triton's interpreter is still wrong there, and right when it is mended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.triton_device import IS_INTERPRETED, NOT_INTERPRETED, has_triton

if not (has_triton() and IS_INTERPRETED):
    pytest.skip(NOT_INTERPRETED, allow_module_level=True)

pytestmark = pytest.mark.triton
ROOT = Path(__file__).resolve().parents[5]
KERNELS = """
import sys
import torch, triton, triton.language as tl
from tests.support import triton_device

@triton.jit
def dot(A, B, OUT):
    at = tl.arange(0, 16)
    places = at[:, None] * 16 + at[None, :]
    tl.store(OUT + places, tl.dot(tl.load(A + places), tl.load(B + places)))

@triton.jit
def copy(A, OUT, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(OUT + at, tl.load(A + at))

@triton.jit
def product(A, OUT, FACTOR: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(OUT + at, tl.load(A + at) * FACTOR)

@triton.jit
def rounded(A, OUT):
    at = tl.arange(0, 16)
    tl.store(OUT + at, tl.load(A + at).to(tl.float8e4nv))
"""
DOT = """
if sys.argv[1] == "mended":
    triton_device.widen_bfloat16_operands()
generator = torch.Generator().manual_seed(0)
a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
out = torch.zeros(16, 16)
dot[(1,)](a, b, out)
print("right" if torch.allclose(out, a.float() @ b.float(), atol=1e-3) else "wrong")
"""
ADDRESSES = """
if sys.argv[1] == "mended":
    triton_device.check_addresses()
a, out = torch.zeros(16), torch.zeros(64)
copy[(1,)](a, out, SIZE=16)
try:
    copy[(1,)](a, out, SIZE=32)
    print("wrong")
except Exception as error:
    print("right" if "outside of its arguments" in str(error) else error)
"""
ROUNDING = """
if sys.argv[1] == "mended":
    triton_device.round_to_fp8()
# Ties, a carry into the exponent, and a number below the smallest normal one.
a = torch.tensor([1.0625, 1.1875, 1.97, 248.1, 0.0117] + 11 * [0.3])
out = torch.zeros(16).to(torch.float8_e4m3fn)
rounded[(1,)](a, out)
print("right" if torch.equal(out.float(), a.to(torch.float8_e4m3fn).float()) else "wrong")
"""


OVERFLOW = """
if sys.argv[1] == "mended":
    triton_device.check_overflow()
a, out = torch.full((16,), 2**20, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
product[(1,)](a, out, FACTOR=2047)
assert out.tolist() == [2**20 * 2047] * 16
try:
    product[(1,)](a, out, FACTOR=2048)
    print("wrong")
except Exception as error:
    print("right" if "overflow detected" in str(error) else error)
"""


@pytest.mark.parametrize(
    ("how", "results"),
    [("mended", ["right"] * 4), ("as it is", ["wrong"] * 4)],
)
def test_the_interpreter(how: str, results: list[str], tmp_path: Path) -> None:
    """Where "as it is" is right, `tests.support.triton_device` can leave its mend out."""
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS + DOT + ADDRESSES + ROUNDING + OVERFLOW, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), how],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stdout.split() == results, run.stdout + run.stderr[-2000:]

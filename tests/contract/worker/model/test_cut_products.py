"""However a product is cut for the threads, many rows are the rows of few, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.cpu_kernels import NUM_THREADS, kernels, variants
from worker.engine_options import Quantization
from worker.model.cpu.library import NativeKernels
from worker.model.cpu.native_ops import NativeOps

SIZE_IN = 1536
SIZE_OUT = 600  # 19 panels, the last one not whole: even for no number of threads here
FEW = 5  # rows that are written to the side and committed
# One block of rows, and several: 683 rows of bf16 are four times what a block holds.
ROWS = (FEW + 1, 96, 300, 683)
NAN = float("nan")


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> NativeKernels:
    return kernels(request.param)


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_many_rows_are_the_rows_of_few(
    library: NativeKernels, quantization: Quantization, is_gated: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SIZE_OUT, SIZE_IN, generator=generator).to(torch.bfloat16) * 0.03
    ops = NativeOps(library, quantization=quantization)
    multiply = (ops.gated_linear if is_gated else ops.linear)(weight, None)
    all_rows = torch.randn(max(ROWS), SIZE_IN, generator=generator).to(torch.bfloat16)
    expected = torch.cat([multiply(few).clone() for few in all_rows.split(FEW)])
    try:
        for threads in (1, 2, NUM_THREADS, 7):
            library.set_num_threads(threads)
            for rows in ROWS:
                x = all_rows[:rows].clone()
                found = multiply(x)
                x.fill_(NAN)  # the call has returned: nobody reads it any more
                assert torch.equal(found, expected[:rows]), (threads, rows)
    finally:
        library.set_num_threads(NUM_THREADS)

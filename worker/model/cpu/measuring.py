"""Measures, at load, whether products are right, and which kernel for many rows is quicker.

Single products (see choices.py) and whole steps. What each way computes is first compared with our
own kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from worker.cache import cache_directory
from worker.engine_options import Quantization
from worker.model.attention.input_sizes import prompts
from worker.model.base import DecoderStack, Multiply
from worker.model.cpu.choices import (
    AMX,
    AVX,
    ONEDNN,
    ROWS,
    ProductChoices,
    ProductShape,
    Times,
    choices_path,
    choose,
)
from worker.model.cpu.library import NativeKernels
from worker.model.cpu.native_ops import NativeOps
from worker.model.cpu.onednn_ops import PACKED_OPS
from worker.model.cpu.processor import cpu_features, cpu_model
from worker.model.device import available_host_bytes
from worker.model.kv_cache import KVCachePool
from worker.model.layers.ops import OPERATOR_ERRORS, Ops
from worker.model.tier import TierRequest

logger = logging.getLogger(__name__)

_MOST_OUTPUTS = 4096  # wider weights are measured by their first rows: a column's time is the same
_TURNS = 4  # of all ways, one after the other; the best counts
_MOST_S = 0.8  # for a shape's turns, at least two of them
_WARM_S = 0.01  # until a way's threads are awake, and the system has put them on cores of their own
_SPIN_S = 0.005  # another kernel's idle threads spin this long before they sleep
_MORE_ROUNDS = 3  # before a copy is kept because of a moment's disturbance
_TOLERANCE = 2e-2
_STEP_TURNS = 3  # of both stacks; the best counts
_MOST_STEPS_S = 5.0  # for all turns, at least one of them
_STEP_QUICKER = 1.05
_COPIES_SHARE = 0.25  # of the memory that is free before the weights are packed
_SAMPLE = (3, 64, 48)  # rows, in, out: odd enough to notice a wrong layout
_OPS_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


class ProductMeter:
    """Measures our kernels beside AMX, where it may be used, and beside oneDNN."""

    def __init__(
        self, kernels: NativeKernels, *, quantization: Quantization, with_onednn: bool
    ) -> None:
        self._kernels = kernels
        self._quantization = quantization
        self._with_onednn = with_onednn

    @torch.inference_mode()
    def __call__(self, shape: ProductShape) -> Times:
        """Returns the seconds of each kernel that is available and correct."""
        generator = torch.Generator().manual_seed(0)
        size_out = min(shape.size_out, _MOST_OUTPUTS)
        weight = torch.randn(size_out, shape.size_in, generator=generator).to(torch.bfloat16)
        x = torch.randn(max(ROWS), shape.size_in, generator=generator).to(torch.bfloat16)
        product = _product(NativeOps(self._kernels, quantization=self._quantization), weight, shape)
        expected = product(x).float().clone()
        ways = {AVX: product}
        for name, make_ops in self._others().items():
            try:
                way = _product(make_ops(), weight, shape)
                found = way(x).float()
            except OPERATOR_ERRORS as error:
                if name != ONEDNN:
                    raise
                # Torch's operators for packed products are private: they may vanish or change.
                logger.debug("not using %s for matrix products: %s", name, error)
                continue
            if (found - expected).norm() <= _TOLERANCE * expected.norm():
                ways[name] = way
            else:
                # Not an error: oneDNN rounds otherwise on processors without VNNI.
                logger.debug(
                    "not using %s for matrix products: its results differ from those of the native "
                    "kernels on this processor",
                    name,
                )
        times = _in_turns(ways, x)
        for _ in range(_MORE_ROUNDS):
            if not choose(times).copy_rows:
                break
            again = _in_turns(ways, x)
            times = {name: tuple(map(min, seconds, again[name])) for name, seconds in times.items()}
        return times

    def _others(self) -> dict[str, Callable[[], Ops]]:
        others: dict[str, Callable[[], Ops]] = {}
        if self._kernels.amx_is_usable():
            others[AMX] = lambda: NativeOps(
                self._kernels, quantization=self._quantization, amx_rows=1
            )
        if self._with_onednn:
            others[ONEDNN] = PACKED_OPS[self._quantization]
        return others


def _product(ops: Ops, weight: Tensor, shape: ProductShape) -> Multiply:
    """Returns the product of a copy of weight [out, in]."""
    make = ops.gated_linear if shape.is_gated else ops.linear
    return make(weight.clone(), None)


def _in_turns(ways: dict[str, Multiply], x: Tensor) -> dict[str, tuple[float, ...]]:
    """Returns the best seconds of each way for each number of rows of x [rows, in] in ROWS."""
    best = {name: [float("inf")] * len(ROWS) for name in ways}
    end_s = time.perf_counter() + _MOST_S
    for turn in range(_TURNS):
        if turn > 1 and time.perf_counter() > end_s:
            break  # a busy machine: the times mean little, and must not delay the start
        for place, rows in enumerate(ROWS):
            part = x[:rows]
            for name, way in ways.items():
                time.sleep(_SPIN_S)
                warm_s = time.perf_counter() + _WARM_S
                while (begin_s := time.perf_counter()) < warm_s:
                    way(part)
                way(part)
                seconds = time.perf_counter() - begin_s
                best[name][place] = min(best[name][place], seconds)
    return {name: tuple(times) for name, times in best.items()}


@torch.inference_mode()
def is_quicker(stack: DecoderStack, other: DecoderStack, pool: KVCachePool, num_rows: int) -> bool:
    """Returns whether `stack` computes prompts of `num_rows` tokens together in clearly less time.

    Writes into the first blocks of `pool`, which hold nothing yet.
    """
    batch = prompts(pool, num_rows)
    best = {id(one): float("inf") for one in (stack, other)}
    end_s = time.perf_counter() + _MOST_STEPS_S
    for turn in range(_STEP_TURNS):
        if turn and time.perf_counter() > end_s:
            break
        for one in (stack, other):
            begin_s = time.perf_counter()
            one(*batch)
            best[id(one)] = min(best[id(one)], time.perf_counter() - begin_s)
    seconds, other_seconds = best[id(stack)], best[id(other)]
    logger.debug(
        "steps of %d tokens take %.1f ms layer by layer, %.1f ms in one call",
        num_rows,
        1e3 * seconds,
        1e3 * other_seconds,
    )
    return seconds * _STEP_QUICKER <= other_seconds


def product_choices(
    kernels: NativeKernels, library: str, request: TierRequest
) -> ProductChoices | None:
    """Returns None where there is nothing to choose between."""
    with_onednn = request.weight_copies != "off"
    if not with_onednn and not kernels.amx_is_usable():
        return None
    machine = {
        "cpu": cpu_model(),
        "features": " ".join(sorted(cpu_features())),
        "torch": torch.__version__,
        "library": library,  # named after its sources, its compiler and its flags
        "threads": str(request.num_threads),
        "quantization": request.quantization,
        "with_onednn": str(with_onednn),
    }
    directory = cache_directory()
    return ProductChoices(
        ProductMeter(kernels, quantization=request.quantization, with_onednn=with_onednn),
        None if directory is None else choices_path(directory, machine),
        copies=request.weight_copies,
        free_bytes=lambda: int(available_host_bytes() * request.memory_share * _COPIES_SHARE),
    )


@torch.inference_mode()
def unavailable_reason(ops: Ops, like: Ops, dtype: torch.dtype) -> str | None:
    """Returns why `ops` cannot be used here: its products differ from those of `like`, or do not
    exist.

    Private operators may vanish or change with any release of torch; none of that is an error.
    """
    rows, size_in, size_out = _SAMPLE
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size_out, size_in, generator=generator).to(dtype)
    bias = torch.randn(size_out, generator=generator).to(dtype)
    x = torch.randn(rows, size_in, generator=generator).to(dtype)
    try:
        found = ops.linear(weight, bias)(x)
    except OPERATOR_ERRORS as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    expected = like.linear(weight, bias)(x)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"a product has shape {list(found.shape)} and type {found.dtype}"
    error_size = (found.float() - expected.float()).norm() / expected.float().norm()
    if not error_size <= _OPS_TOLERANCE.get(dtype, 1e-2):
        return f"products are off by {error_size:.2%}"
    return None

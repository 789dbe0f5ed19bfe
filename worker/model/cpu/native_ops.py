"""NativeOps: the layers' operations through the compiled kernels, in bfloat16."""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from worker.engine_options import Quantization
from worker.model.base import Activation, Multiply
from worker.model.config.model_config import ModelConfig
from worker.model.cpu.choices import Choice, ProductChoices, ProductShape
from worker.model.cpu.library import GATES, NO_GATE, NativeKernels, Scratch, Weight
from worker.model.cpu.onednn_ops import PACKED_OPS
from worker.model.device import HugePages
from worker.model.layers.int4 import Int4Weight, may_be_int4
from worker.model.layers.int4 import quantize_weight as quantize_to_int4
from worker.model.layers.int8 import balance, quantize_weight, spreading_factors
from worker.model.layers.ops import HeadNorm, Norm, Ops

_PANEL = (
    32  # output columns that lie together in a packed weight; a gated panel has 16 of each half
)
MAX_HEAD_DIM = 256
# The number of batch sizes whose activations are kept as views of the same memory.
_MAX_VIEWS = 64


def unavailable_reason(config: ModelConfig) -> str | None:
    """Returns why the kernels cannot run this model; None when they can."""
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % 16:
            return f"{name} {getattr(config, name)} is not a multiple of 16"
    return None


class Workspace:
    """One growing piece of memory for the results of one operation, whatever the batch."""

    def __init__(
        self, width: int, kernels: NativeKernels, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._width = width
        self._settle = kernels.settle
        self._memory = torch.empty(0, dtype=dtype)
        self._views: dict[int, Tensor] = {}

    def rows(self, num_rows: int) -> Tensor:
        """Returns [num_rows, width], not filled. The next call may return the same memory."""
        view = self._views.get(num_rows)
        if view is None:
            size = num_rows * self._width
            if size > self._memory.numel() or len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            if size > self._memory.numel():
                self._settle()  # a late thread may still read the replaced part
                self._memory = torch.empty(size, dtype=self._memory.dtype)
            view = self._memory[:size].view(num_rows, self._width)
            self._views[num_rows] = view
        return view


class FreshRows:
    """In place of a Workspace: new memory for each result, for callers that keep several."""

    def __init__(self, width: int) -> None:
        self._width = width

    def rows(self, num_rows: int) -> Tensor:
        """Returns [num_rows, width], not filled."""
        return torch.empty(num_rows, self._width, dtype=torch.bfloat16)


class ProductBuffers:
    """What products need besides their operands; they use it one after the other."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._rows = Workspace(1, kernels)
        self._scales = Workspace(1, kernels, torch.float32)

    def of(self, num_rows: int, size_in: int) -> Scratch:
        """Returns memory for `num_rows` rows of `size_in` numbers; the next call may reuse it."""
        return Scratch(
            self._rows.rows(num_rows * size_in).data_ptr(), self._scales.rows(num_rows).data_ptr()
        )


class OnTorchThreads:
    """A product of torch's: for its time torch has the threads that it has not beside our own."""

    def __init__(self, multiply: Multiply, num_threads: int) -> None:
        self._multiply = multiply
        self._num_threads = num_threads

    def __call__(self, x: Tensor) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return self._multiply(x)
        finally:
            torch.set_num_threads(before)


class NativeProduct:
    """[rows, in] -> [rows, out] through a packed weight, which it keeps alive.

    `weight` is the kernels' own view of it. From `many_rows` on `many` computes, if there is one.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        weight: Weight,
        tensors: tuple[Tensor, ...],
        results: Workspace | FreshRows,
        scratch: ProductBuffers,
        many: Multiply | None = None,
        many_rows: int = 0,
    ) -> None:
        """`tensors` are the memory of the weight's addresses."""
        self.weight = weight
        self.many_rows = many_rows
        self._many = many
        self._tensors = tensors
        self._kernel = kernels.linear
        self._settle = kernels.settle
        self._results = results
        self._scratch = scratch

    def __call__(self, x: Tensor) -> Tensor:
        rows, size_in = x.shape
        if self._many is not None and rows >= self.many_rows:
            return self._many(x)
        out = self._results.rows(rows)
        scratch = self._scratch.of(rows, size_in)
        self._kernel(self.weight, x.data_ptr(), scratch, out.data_ptr(), rows)
        return out

    def drop_copy(self) -> None:
        """Leaves every number of rows to our kernel."""
        self._many = None
        self.many_rows = 0

    def __del__(self) -> None:
        self._settle()  # a late thread may still read the weight


class NativeOps(Ops):
    """Sums are float32 and rounded once, where TorchOps rounds after every operation.

    With int8 and int4 the products quantize weights at load and activations as they come.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        *,
        quantization: Quantization = "none",
        choices: ProductChoices | None = None,
        amx_rows: int = 0,
        torch_threads: int = 1,
        keeps_results: bool = False,
    ) -> None:
        """`quantization`: none, int8 or int4. `choices` decides how products of many rows are
        computed; without it AMX does from `amx_rows` on, 0 for never. oneDNN computes with
        `torch_threads`. `keeps_results`: each result has memory of its own, beyond what Ops
        promises."""
        self._kernels = kernels
        self._keeps_results = keeps_results
        self._quantization = quantization
        self.measures_inputs = quantization != "none"
        self._input_sizes: Tensor | None = None
        self._choices = choices
        self._choice = Choice(amx_rows)
        self._torch_threads = torch_threads
        self._with_copies: list[NativeProduct] = []
        self._memory = HugePages()
        self._scratch = ProductBuffers(kernels)
        # Products of the same width share their memory, across layers: see Ops.
        self._results: dict[tuple[int, bool], Workspace | FreshRows] = {}
        self._normed: dict[int, Workspace | FreshRows] = {}

    def for_inputs(self, sizes: Tensor) -> Self:
        ops = copy.copy(self)
        ops._input_sizes = sizes
        return ops

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return self._product(weight, bias, is_gated=False)

    def gated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation = "silu"
    ) -> Multiply:
        return self._product(weight, bias, is_gated=True, activation=activation)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm, delta_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, size = x.shape
        workspace = self._normed.get(size)
        if workspace is None:
            workspace = self._normed[size] = self._new_rows(size)
        out = workspace.rows(rows)
        self._kernels.add_rms_norm(
            x.data_ptr(),
            delta.data_ptr() if delta is not None else None,
            delta_norm.weight.data_ptr() if delta_norm is not None else None,
            norm.weight.data_ptr(),
            float(norm.adds_one),
            out.data_ptr(),
            norm.eps,
            rows,
            size,
        )
        return x, out

    def rotate(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        norm: HeadNorm | None,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, width = qkv.shape
        head_dim = 2 * cos.shape[-1]
        self._kernels.norm_rope(
            qkv.data_ptr(),
            width,
            norm.query.weight.data_ptr() if norm is not None else None,
            norm.key.weight.data_ptr() if norm is not None else None,
            float(norm.query.adds_one) if norm is not None else 0.0,
            norm.query.eps if norm is not None else 0.0,
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
        )
        heads = qkv.view(num_tokens, -1, head_dim)
        num_rotated = num_heads + num_kv_heads
        return heads[:, :num_heads], heads[:, num_heads:num_rotated], heads[:, num_rotated:]

    def _product(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        is_gated: bool,
        activation: Activation = "silu",
    ) -> NativeProduct:
        """Packs weight [out, in] and bias [out] for the kernels."""
        choice = self._choose(weight, is_gated)
        many = None
        if choice.copy_rows:
            many = self._copy(weight, bias, activation if is_gated else None)
        num_columns = weight.shape[0] // 2 if is_gated else weight.shape[0]
        if is_gated:
            weight = _interleaved(weight)
            bias = _interleaved(bias[:, None])[:, 0] if bias is not None else None
        else:
            weight = _whole_panels(weight)
        there = Weight(
            n=num_columns,
            k=weight.shape[1],
            gate=GATES[activation] if is_gated else NO_GATE,
            amx_rows=choice.amx_rows,
        )
        tensors = []

        def lend(tensor: Tensor) -> int:
            tensors.append(tensor)
            return tensor.data_ptr()

        if self._quantization != "none":
            scale = balance(weight, self._input_sizes)
            if self._quantization == "int4" and may_be_int4(weight.shape[1]):
                narrow = quantize_to_int4(weight, scale)
                scales, sums = narrow.scales, narrow.row_sums()
                there.packed, there.is_int4 = lend(self._memory.copy(_int4_panels(narrow))), 1
            else:
                quantized = quantize_weight(weight, scale)
                scales, sums = quantized.scales, quantized.values.sum(dim=1, dtype=torch.int32)
                there.packed = lend(self._memory.copy(_blocked(quantized.values)))
            there.scales = lend(scales)
            there.offset = lend(128 * sums)
            inverse = None if scale is None else 1 / scale
            there.factors = lend(spreading_factors(weight.shape[1], inverse))
        else:
            there.packed = lend(self._memory.copy(_blocked(weight)))
        if bias is not None:
            there.bias = lend(_padded(bias.float(), len(weight)))
        results = self._workspace(num_columns, is_gated)
        product = NativeProduct(
            self._kernels, there, tuple(tensors), results, self._scratch, many, choice.copy_rows
        )
        if many is not None:
            self._with_copies.append(product)
        return product

    def drop_copies(self) -> None:
        """Frees oneDNN's copies of all weights; the kernels then compute every number of rows."""
        for product in self._with_copies:
            product.drop_copy()
        self._with_copies.clear()

    def _choose(self, weight: Tensor, is_gated: bool) -> Choice:
        """Returns from how many rows on weight [out, in] is computed otherwise."""
        if self._choices is None:
            return self._choice
        shape = ProductShape(weight.shape[0], weight.shape[1], is_gated)
        return self._choices.of(shape, weight.numel() * (2 if self._quantization == "none" else 1))

    def _copy(self, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Multiply:
        """Returns oneDNN's product of a copy of weight [out, in] in a layout of its own."""
        ops = PACKED_OPS[self._quantization]()
        if self._input_sizes is not None:
            ops = ops.for_inputs(self._input_sizes)
        if activation is None:
            product = ops.linear(weight, bias)
        else:
            product = ops.gated_linear(weight, bias, activation)
        return OnTorchThreads(product, self._torch_threads)

    def _workspace(self, num_columns: int, is_gated: bool) -> Workspace | FreshRows:
        return self._results.setdefault((num_columns, is_gated), self._new_rows(num_columns))

    def _new_rows(self, width: int) -> Workspace | FreshRows:
        return FreshRows(width) if self._keeps_results else Workspace(width, self._kernels)


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Returns [rows, ...] with zero rows appended, as [size, ...] contiguous."""
    missing = size - tensor.shape[0]
    padding = [0, 0] * (tensor.dim() - 1) + [0, missing]
    return functional.pad(tensor, padding) if missing else tensor.contiguous()


def _whole_panels(weight: Tensor) -> Tensor:
    """Returns [out, in] with zero rows appended up to a multiple of a panel's rows."""
    return _padded(weight, -(-weight.shape[0] // _PANEL) * _PANEL)


def _interleaved(weight: Tensor) -> Tensor:
    """Returns [2 n, in], gate before up, as panels of 16 gate rows and the 16 up rows of these."""
    half = _PANEL // 2
    gate, up = weight.chunk(2, dim=0)
    size = -(-gate.shape[0] // half) * half
    parts = [_padded(part, size).view(-1, half, weight.shape[1]) for part in (gate, up)]
    return torch.cat(parts, dim=1).reshape(2 * size, weight.shape[1])


def _blocked(weight: Tensor) -> Tensor:
    """Returns a view of [out, in] as [out / 32, groups, 32] int32, as kernels.cpp reads it: a group
    is two bfloat16 of a row, or four int8. It is copied faster than by these elements."""
    groups = weight.view(torch.int32)
    return groups.view(len(groups) // _PANEL, _PANEL, -1).transpose(1, 2)


def _int4_panels(weight: Int4Weight) -> Tensor:
    """Returns [out / 32, in / 32, bytes] uint8, as kernels.cpp reads it."""
    panels, groups = len(weight.numbers) // _PANEL, weight.factors.shape[1]
    # Columns of a panel are in two halves; quadruples of a column in pairs.
    blocks = weight.numbers.view(panels, 2, _PANEL // 2, groups, 4, 2, 4)
    low, high = blocks.unbind(dim=5)
    nibbles = (low | high << 4).permute(0, 3, 4, 1, 2, 5).reshape(panels, groups, -1)
    of_columns = [
        one.view(panels, _PANEL, groups).transpose(1, 2) for one in (weight.factors, weight.offsets)
    ]
    return torch.cat((*of_columns, nibbles), dim=2)

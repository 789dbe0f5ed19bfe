"""Products and norms of transformers' modules, computed by a tier's operations.

Plain `nn.Linear` modules that a forward pass really calls give their weights to the tier. Those
with one and the same input (queries, keys and values; gate and up) become one product. Norms that
compute what a root mean square norm computes become one call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.engines.transformers.config import in_one_line
from worker.model.base import Multiply
from worker.model.device import step_failure
from worker.model.layers.ops import Norm, Ops, for_inputs

log = logging.getLogger(__name__)

_WIDTH = 16  # in numbers: what the kernels need of a row
# Tolerance of a row's result, by its dtype: a few roundings of each number.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_SCALES = (1e-2, 1.0, 30.0, 1e3)  # the largest reach a clamp
_LARGEST_IN_FLOAT16 = 30.0  # whose products of two such rows stay finite
_MEAN = 4.0  # in standard deviations
_LARGE = 20.0  # what a few channels of trained models are, beside the others
_EVERY = 61  # channels
# Small matrices that choose experts: as exact as the checkpoint has them, whatever the products.
_ROUTERS = frozenset({"gate", "router", "wg"})


@dataclass(frozen=True, slots=True)
class LinearCall:
    """A call of an `nn.Linear` in a forward pass."""

    name: str  # of the module
    input: Tensor


def groups_of(calls: Sequence[LinearCall]) -> tuple[tuple[str, ...], ...]:
    """Returns the modules' names in groups: of the same parent, with the same input.

    A module that is called more than once is in no group.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for call in calls:  # whose tensors are alive, so their ids differ
        parent = call.name.rpartition(".")[0]
        groups.setdefault((parent, id(call.input)), []).append(call.name)
    names = [call.name for call in calls]
    return tuple(
        tuple(group) for group in groups.values() if all(names.count(name) == 1 for name in group)
    )


def rows_of(x: Tensor) -> Tensor:
    """Returns x [..., size] as [rows, size], contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.is_contiguous() else rows.contiguous()


class SharedProduct:
    """The products of modules with one input, computed by the first that is called."""

    def __init__(self, multiply: Multiply, sizes: Sequence[int]) -> None:
        self.multiply = multiply
        self.sizes = list(sizes)  # of the modules' results, which lie side by side
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._missing = 0

    def part(self, index: int, x: Tensor) -> Tensor:
        """Returns the product of module `index`, [..., size], of x [..., in]."""
        if x is not self._input:
            out = self.multiply(rows_of(x)).view(*x.shape[:-1], -1)
            if len(self.sizes) == 1:
                return out
            self._input, self._parts = x, out.split_with_sizes(self.sizes, dim=-1)
            self._missing = len(self.sizes)
        part = self._parts[index]
        self._missing -= 1
        if not self._missing:  # the input may be freed, and another have its place
            self._input, self._parts = None, ()
        return part


class ProductModule(nn.Module):
    """Stands where an `nn.Linear` was. Its `weight` has a shape and a dtype, and no numbers."""

    def __init__(self, linear: nn.Linear, product: SharedProduct, index: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = None if linear.bias is None else torch.empty_like(linear.bias, device="meta")
        self.product = product
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(self._index, x)


class NormModule(nn.Module):
    """Stands where a root mean square norm was."""

    def __init__(self, norm: Norm, ops: Ops) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.eps
        self.norm = norm
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.add_norm(rows_of(x), None, self.norm)[1].view(x.shape)


@contextlib.contextmanager
def input_sizes(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Gives a mapping that gets, by the name of a linear module, the root mean squares [in] of its
    inputs in the forward passes of the context."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    sizes: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        rows = rows_of(x).float()
        sums[name] = rows.square().sum(dim=0) + sums.get(name, 0)
        counts[name] = len(rows) + counts.get(name, 0)
        sizes[name] = (sums[name] / counts[name]).sqrt()

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    ]
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()


def replace_linears(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    ops: Ops,
    dtype: torch.dtype,
    inputs: Mapping[str, Tensor] | None = None,
) -> int:
    """Gives the weights of plain linear modules to `ops`; returns how many. `inputs` are their
    `input_sizes`, where they are known.

    Modules of a group whose biases, types or widths do not fit become products of their own.
    """
    count = 0
    for group in groups:
        modules = [
            (name, module) for name in group if (module := find_module(model, name)) is not None
        ]
        fitting = [
            (name, module)
            for name, module in modules
            if type(module) is nn.Linear
            and name.rpartition(".")[2] not in _ROUTERS
            and module.weight.dtype == dtype
            and not module.in_features % _WIDTH
        ]
        is_one = len({module.bias is None for _, module in fitting}) == 1
        for part in [fitting] if is_one else [[one] for one in fitting]:
            linears = [module for _, module in part]
            sizes = [module.out_features for module in linears]
            of_inputs = for_inputs(ops, (inputs or {}).get(part[0][0]) if part else None)
            product = SharedProduct(of_inputs.linear(*_joined(linears)), sizes)
            for index, (name, module) in enumerate(part):
                replace_module(model, name, ProductModule(module, product, index))
            count += len(part)
            del linears, part  # their memory goes before the next is packed
    return count


def replace_norms(model: nn.Module, ops: Ops, dtype: torch.dtype) -> int:
    """Computes norms that are root mean square norms, as a trial shows, with `ops`; returns how
    many."""
    count = 0
    for name in [name for name, _ in model.named_modules()]:
        module = find_module(model, name)
        if module is not None and (norm := _as_norm(module, dtype)):
            made = NormModule(norm, ops)
            x = tried_rows(len(norm.weight), dtype, norm.weight.device)
            if agree(lambda: module(x.clone()), lambda: made(x.clone()), x.device):  # noqa: B023
                replace_module(model, name, made)
                count += 1
    return count


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """Returns the module of that name; None where the one around it has been replaced."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Returns weight [out, in] and bias [out] of all, one after the other."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    if len(linears) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts `module` where the one of that name was."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _as_norm(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    """Returns the norm that the module may be; None where it cannot be one."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(parameters) != ["weight"] or weight is None or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or weight.dtype != dtype or len(weight) % _WIDTH:
        return None
    with torch.inference_mode():
        ones = torch.ones(1, len(weight), dtype=dtype, device=weight.device)
        try:
            adds_one = bool(((module(ones) - weight).float().mean() > 0.5).item())
        except Exception as error:  # a module that takes other arguments is no norm
            raise_of_device(error, weight.device)
            return None
    return Norm(weight.detach(), eps, adds_one)


def tried_rows(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns random rows [n, size] that distinguish functions that rows around zero do not.

    Some have a mean of several standard deviations, which a norm that centres takes away; some a
    few large channels; some are so large that a clamp is reached.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for scale in _SCALES:
        if dtype is torch.float16 and scale > _LARGEST_IN_FLOAT16:
            continue
        plain = torch.randn(size, generator=generator)
        channels = torch.randn(size, generator=generator)
        channels[::_EVERY] *= _LARGE
        rows += [scale * row for row in (plain, plain + _MEAN, plain - _MEAN, channels)]
    return torch.stack(rows).to(device, dtype)


def agree(module: Callable[[], Tensor], other: Callable[[], Tensor], device: torch.device) -> bool:
    """Returns whether both compute the same in each row, up to the rounding of its dtype. Raises
    OutOfMemory or DeviceLost."""
    with torch.inference_mode():
        try:
            result = module()
        except Exception as error:  # it takes other arguments, so it is another kind of module
            raise_of_device(error, device)
            return False
        try:
            found = other()
        except Exception as error:  # of a kernel or its compiler
            leave_to_torch(error, device)
            return False
        return are_close(found, result)


def leave_to_torch(error: Exception, device: torch.device) -> None:
    """Logs why torch still computes a module. Raises OutOfMemory or DeviceLost where the error
    means that."""
    raise_of_device(error, device)
    log.warning(
        "torch computes a module of the model, because a kernel for it fails: %s: %s",
        type(error).__name__,
        in_one_line(error),
    )


def raise_of_device(error: Exception, device: torch.device) -> None:
    """Raises OutOfMemory or DeviceLost where the error means that."""
    if failure := step_failure(error, device):
        raise failure from error


def are_close(found: Tensor, expected: Tensor) -> bool:
    """Returns whether rows [..., size] differ by no more than the rounding of their dtype."""
    if found.shape != expected.shape:
        return False
    wide = expected.float()
    errors = (found.float() - wide).norm(dim=-1)
    return bool((errors <= _TOLERANCES[expected.dtype] * wide.norm(dim=-1)).all())

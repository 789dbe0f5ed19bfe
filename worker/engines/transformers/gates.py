"""Gated feed-forward blocks and experts of transformers, computed by a tier's products.

A module is taken for the kind that its members' names suggest only if a trial over random rows,
with torch's own operators, has the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from worker.engines.transformers.products import (
    agree,
    find_module,
    leave_to_torch,
    replace_module,
    rows_of,
    tried_rows,
)
from worker.model.base import Activation, Multiply
from worker.model.layers.ops import ComputeExperts, ExpertWeights, Ops, TorchOps, for_inputs

_WIDTH = 16  # in numbers: what the kernels need of a row
_SUMMED = 32  # tokens at a time, whose experts' results stay in the cache of a core


class GatedModule(nn.Module):
    """Stands where a gated block was: down(activation(gate(x)) * up(x))."""

    def __init__(self, gated: Multiply, down: Multiply) -> None:
        super().__init__()
        self.gated = gated
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(rows_of(x)).view(x.shape)

    def rows(self, x: Tensor) -> Tensor:
        """Maps [rows, size] to the same shape; x is contiguous."""
        return self.down(self.gated(x))


class ExpertsModule(nn.Module):
    """Stands where a mixture's experts were, each a gated block of its own."""

    def __init__(self, gated: list[Multiply], down: list[Multiply]) -> None:
        super().__init__()
        self.num_experts = len(gated)
        self._gated = gated
        self._down = down

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the sum of each token's experts, [tokens, hidden].

        `hidden_states` are [tokens, hidden], experts and their weights [tokens, k].
        """
        experts = top_k_index.flatten()
        order = experts.argsort(stable=True)
        tokens = torch.div(order, top_k_index.shape[1], rounding_mode="floor")
        rows = hidden_states.index_select(0, tokens)
        parts, start = [], 0
        for expert, count in enumerate(experts.bincount(minlength=self.num_experts).tolist()):
            if count:
                inner = self._gated[expert](rows[start : start + count])
                parts.append(self._down[expert](inner))
                start += count
        results = torch.cat(parts)
        # Each token's experts in their order, so that its sum does not depend on other tokens.
        places = order.argsort().view(top_k_index.shape)
        return torch.cat(
            [
                (results[some].float() * weights[:, :, None]).sum(dim=1).to(hidden_states.dtype)
                for some, weights in zip(
                    torch.split(places, _SUMMED), torch.split(top_k_weights, _SUMMED), strict=True
                )
            ]
        )


class AllExperts(nn.Module):
    """Stands where a mixture's experts were, computed by one operation of a tier."""

    def __init__(self, compute: ComputeExperts) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns what ExpertsModule does."""
        x = rows_of(hidden_states)
        out = self._compute(x, top_k_index.contiguous(), top_k_weights.contiguous())
        return out.view(hidden_states.shape)


def replace_gated(
    model: nn.Module,
    ops: Ops,
    dtype: torch.dtype,
    inputs: Mapping[str, Tensor] | None = None,
) -> int:
    """Computes gated blocks and experts with `ops`, to which their weights go; returns how many.

    `inputs` are the `input_sizes` of linear modules, where they are known.
    """
    count = 0
    sizes = inputs or {}
    for name in [name for name, _ in model.named_modules()]:
        module = find_module(model, name)
        if module is None:
            continue
        make = _as_gated(module, dtype) or _as_experts(module, dtype, ops)
        if make is not None:
            inner = sizes.get(f"{name}.gate_up_proj", sizes.get(f"{name}.gate_proj"))
            down = sizes.get(f"{name}.down_proj")
            replace_module(model, name, make(for_inputs(ops, inner), for_inputs(ops, down)))
            count += 1
        del module, make  # their memory goes before the next is made
    return count


_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}

Make = Callable[[Ops, Ops], nn.Module]  # of the gated product, and of the one after it


def _activation(module: nn.Module) -> Activation | None:
    function = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    return _ACTIVATIONS.get(type(function).__name__)


def _as_gated(module: nn.Module, dtype: torch.dtype) -> Make | None:
    """Returns what makes the module anew; None where it is no gated block."""
    activation = _activation(module)
    linears = {name: one for name, one in module.named_children() if type(one) is nn.Linear}
    if activation is None or set(linears) - {"gate_up_proj"} not in (
        {"gate_proj", "up_proj", "down_proj"},
        {"down_proj"},
    ):
        return None
    inner = [linears[name] for name in ("gate_up_proj", "gate_proj", "up_proj") if name in linears]
    down = linears["down_proj"]
    if not inner or not _fits(dtype, *(one.weight for one in (*inner, down))):
        return None
    if len({one.bias is None for one in inner}) > 1:
        return None

    def make(ops: Ops, ops_down: Ops) -> nn.Module:
        weight = torch.cat([one.weight.detach() for one in inner])
        biases = [one.bias.detach() for one in inner if one.bias is not None]
        gated = ops.gated_linear(weight, torch.cat(biases) if biases else None, activation)
        bias = None if down.bias is None else down.bias.detach()
        return GatedModule(gated, ops_down.linear(down.weight.detach(), bias))

    x = tried_rows(down.out_features, dtype, down.weight.device)
    is_same = agree(lambda: module(x), lambda: make(TorchOps(), TorchOps())(x), x.device)
    return make if is_same else None


def _as_experts(module: nn.Module, dtype: torch.dtype, ops: Ops) -> Make | None:
    """Returns what makes the module anew; None where it is no module of gated experts."""
    weights = experts_weights(module, dtype)
    if weights is None:
        return None
    try:
        compute = ops.experts(weights)
    except Exception as error:  # of a kernel or its compiler
        leave_to_torch(error, weights.down.device)
        return None
    tried = TorchOps()
    activation = weights.activation
    if compute is None and (weights.gate_up_bias is not None or activation == "clamped"):
        return None

    def make(ops: Ops, ops_down: Ops) -> nn.Module:
        if compute is not None:
            return AllExperts(compute)
        assert activation != "clamped", "see above"
        return ExpertsModule(
            [ops.gated_linear(weight, None, activation) for weight in weights.gate_up],
            [ops_down.linear(weight, None) for weight in weights.down],
        )

    num_experts, size, _ = weights.down.shape
    x = tried_rows(size, dtype, weights.down.device)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(len(x), num_experts, generator=generator).topk(min(2, num_experts)).indices
    by = torch.rand(chosen.shape, generator=generator).to(dtype)
    chosen, by = chosen.to(x.device), by.to(x.device)
    is_same = agree(
        lambda: module(x, chosen, by), lambda: make(tried, tried)(x, chosen, by), x.device
    )
    return make if is_same else None


def experts_weights(module: nn.Module, dtype: torch.dtype) -> ExpertWeights | None:
    """Returns the weights that the module's members' names suggest; None for another kind."""
    parameters = {name: one.detach() for name, one in module.named_parameters()}
    if not {"gate_up_proj", "down_proj"} <= set(parameters):
        return None
    gate_up, down = parameters.pop("gate_up_proj"), parameters.pop("down_proj")
    if gate_up.dim() != 3 or down.dim() != 3:
        return None
    if set(parameters) == {"gate_up_proj_bias", "down_proj_bias"}:
        return _clamped(module, gate_up, down, parameters, dtype)
    activation = _activation(module)
    if parameters or activation is None or gate_up.shape[2] != down.shape[1]:
        return None
    if not _fits(dtype, gate_up, down):
        return None
    return ExpertWeights(
        gate_up=gate_up.contiguous(), down=down.contiguous(), activation=activation
    )


def _clamped(
    module: nn.Module,
    gate_up: Tensor,
    down: Tensor,
    biases: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> ExpertWeights | None:
    """Returns the weights of experts as gpt-oss has them, copied: it multiplies from the left, and
    has gates and ups in turns."""
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if not isinstance(limit, float) or not isinstance(alpha, float):
        return None
    gate_up, down = gate_up.mT, down.mT
    gate_up_bias, down_bias = biases["gate_up_proj_bias"], biases["down_proj_bias"]
    if gate_up.shape[2] != down.shape[1] or not _fits(dtype, gate_up, down):
        return None
    if gate_up_bias.dtype != dtype or down_bias.dtype != dtype:
        return None
    return ExpertWeights(
        gate_up=torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1).contiguous(),
        gate_up_bias=torch.cat((gate_up_bias[:, ::2], gate_up_bias[:, 1::2]), dim=1),
        down=down.contiguous(),
        down_bias=down_bias,
        activation="clamped",
        limit=limit,
        alpha=alpha,
    )


def _fits(dtype: torch.dtype, *weights: Tensor) -> bool:
    return all(
        weight.dtype == dtype and not weight.is_meta and not weight.shape[-1] % _WIDTH
        for weight in weights
    )

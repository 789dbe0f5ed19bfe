"""Experts: a mixture's gated blocks in four launches, for decodes and prompts alike.

The twin is the code of transformers' modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from worker.model.cuda.kernels.experts import (
    CLAMPED,
    GELU_TANH,
    PLAIN,
    SILU,
    experts_product,
    sort_pairs,
    sum_pairs,
)
from worker.model.layers.ops import ExpertWeights

_SORTED_AT_ONCE = 1024
_SUMMED_AT_ONCE = 1024
_ACTIVATIONS = {"silu": int(SILU), "gelu_tanh": int(GELU_TANH), "clamped": int(CLAMPED)}


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How the product is cut: rows and columns of a tile, inner numbers of a step, warps, stages
    of its loads."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# By the least pairs of an expert, on average.
_TILES = {
    0: ExpertTiles(16, 32, 128, 4, 4),
    16: ExpertTiles(32, 64, 64, 4, 3),
    64: ExpertTiles(64, 64, 64, 4, 3),
    256: ExpertTiles(128, 64, 64, 8, 3),
}


def expert_tiles(num_pairs: int, num_experts: int, size_in: int, itemsize: int) -> ExpertTiles:
    """Returns the tiles for `num_pairs` pairs of a token and an expert: of few rows where experts
    have few tokens, as then reading weights takes the time."""
    mean = num_pairs // num_experts
    tiles = [of_mean for least, of_mean in _TILES.items() if least <= mean][-1]
    inner = tiles.inner if itemsize <= 2 else tiles.inner // 2
    while size_in % inner:
        inner //= 2
    return replace(tiles, inner=inner)


class Experts:
    """Maps x [tokens, hidden], experts [tokens, chosen] and their weights to [tokens, hidden]."""

    def __init__(self, weights: ExpertWeights) -> None:
        """Their matrices are contiguous, with rows of a multiple of 16 numbers."""
        self._weights = weights
        self._activation = _ACTIVATIONS[weights.activation]
        self._compile()

    def _compile(self) -> None:
        """Compiles the product for all tiles, so that no answer waits for it: without pairs, all
        programs end at once. Experts of the same shapes share compiled kernels."""
        weights = self._weights
        num_experts, size, inner_size = weights.down.shape
        new = partial(weights.down.new_zeros, 1)
        nothing = weights.down.new_zeros(num_experts + 1, dtype=torch.int32)
        for least in _TILES:
            for weight, bias, size_in, size_out, activation in (
                (weights.gate_up, weights.gate_up_bias, size, inner_size, self._activation),
                (weights.down, weights.down_bias, inner_size, size, int(PLAIN)),
            ):
                tiles = expert_tiles(least * num_experts, num_experts, size_in, weight.itemsize)
                out = new(size_out)
                self._launch(
                    (1, 1), tiles, new(size_in), weight, bias, out, (nothing, nothing), activation
                )

    def __call__(self, x: Tensor, chosen: Tensor, by: Tensor) -> Tensor:
        """Computes a step, whose tensors are contiguous. Nothing here waits for the device."""
        weights = self._weights
        num_experts, size, inner_size = weights.down.shape
        num_tokens, num_chosen = chosen.shape
        num_pairs = num_tokens * num_chosen
        order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
        sort_pairs[(num_experts,)](
            chosen, order, starts, num_pairs, EXPERTS=num_experts, BLOCK=_SORTED_AT_ONCE
        )
        inner = x.new_empty(num_pairs, inner_size)
        sorted_pairs = order, starts
        self._multiply(
            x, weights.gate_up, weights.gate_up_bias, inner, sorted_pairs, self._activation
        )
        results = x.new_empty(num_pairs, size)
        self._multiply(inner, weights.down, weights.down_bias, results, sorted_pairs, int(PLAIN))
        out = torch.empty_like(x)
        sum_pairs[(num_tokens, triton.cdiv(size, _SUMMED_AT_ONCE))](
            results,
            by,
            out,
            num_chosen,
            SIZE=size,
            BLOCK=min(_SUMMED_AT_ONCE, triton.next_power_of_2(size)),
            num_warps=4,
        )
        return out

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        sorted_pairs: tuple[Tensor, Tensor],
        activation: int,
    ) -> None:
        """Writes the products of all pairs into `out` [pairs, out]; x has a row for each pair, or
        one for each token."""
        num_pairs, size = out.shape
        num_experts = len(weight)
        tiles = expert_tiles(num_pairs, num_experts, x.shape[1], x.element_size())
        # Each expert that has pairs may have a tile that is not full.
        num_tiles = min(num_pairs, num_experts) + num_pairs // tiles.rows
        grid = num_tiles, triton.cdiv(size, tiles.columns)
        self._launch(grid, tiles, x, weight, bias, out, sorted_pairs, activation)

    def _launch(
        self,
        grid: tuple[int, int],
        tiles: ExpertTiles,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        sorted_pairs: tuple[Tensor, Tensor],
        activation: int,
    ) -> None:
        num_experts = len(weight)
        experts_product[grid](
            x,
            weight,
            weight if bias is None else bias,
            out,
            *sorted_pairs,
            self._weights.limit,
            self._weights.alpha,
            len(out) // len(x),
            EXPERTS=num_experts,
            EXPERTS_WIDTH=triton.next_power_of_2(num_experts),
            IN=x.shape[1],
            OUT=out.shape[1],
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            BLOCK_K=tiles.inner,
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            PRECISION="tf32" if x.element_size() == 2 else "ieee",
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

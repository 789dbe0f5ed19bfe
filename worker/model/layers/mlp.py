"""The gated feed-forward block (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from worker.model.config import ModelConfig
from worker.model.layers.linear import GatedLinear, Linear
from worker.model.layers.ops import Ops
from worker.model.layers.placement import Placement


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = GatedLinear(hidden, parts, bias=bias, placement=placement)
        self.down = Linear(inner, {"down_proj": hidden}, bias=bias, placement=placement)

    def use(self, ops: Ops) -> None:
        self.gate_up.use(ops)
        self.down.use(ops)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        output: Tensor = self.down(self.gate_up(x))
        return output

    def named_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up.named_tensors(prefix)
        yield from self.down.named_tensors(prefix)

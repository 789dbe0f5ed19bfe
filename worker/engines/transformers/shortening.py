"""Which attention modules and decoder layers of transformers get a shorter forward pass.

A module keeps its type, its attributes and its children. Its `forward` is replaced only where a
trial shows that its own code gives the same to the attention, and the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker.engines.transformers.attention import Attend, PagedAttention
from worker.engines.transformers.gates import GatedModule
from worker.engines.transformers.layers import (
    EMBEDDINGS,
    AttentionParts,
    LayerParts,
    Run,
    ShortAttention,
    ShortLayer,
)
from worker.engines.transformers.products import (
    NormModule,
    ProductModule,
    are_close,
    leave_to_torch,
    tried_rows,
)
from worker.model.cpu.library import NativeKernels
from worker.model.cpu.native_layers import LayerRooms, LayerWeights, NativeLayers
from worker.model.cpu.native_ops import NativeProduct
from worker.model.layers.ops import HeadNorm, Norm, Ops

_WITHOUT_PARTS = (nn.Dropout, nn.Identity)


@torch.inference_mode()
def shorten(
    network: PreTrainedModel,
    attention: PagedAttention,
    ops: Ops,
    kernels: NativeKernels | None,
    context_length: int,
) -> None:
    """Gives attention modules and decoder layers shorter forward passes.

    Their products and norms are `ops`' already, which are those of `kernels` where these are given.
    """
    dtype = network.dtype
    size = int(network.config.get_text_config(decoder=True).hidden_size)
    x = tried_rows(size, dtype, network.device)[None]
    calls = _calls(network, attention, len(x[0]), context_length)
    for module, call in calls.items():
        if short := _as_attention(_Trial(module, call, x, attention), ops):
            module.forward = short
    for module, call in calls.items():
        if layer := _as_layer(_Trial(module, call, x, attention), ops):
            module.forward = layer
    if kernels is not None:
        _join(calls, attention, LayerRooms(kernels))


@dataclass(frozen=True, slots=True)
class _Call:
    """A module's call in a forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int  # the number of the attention's first call in it
    result: Any

    @property
    def hidden_states(self) -> Any:
        return self.args[0] if self.args else self.kwargs.get("hidden_states")


def _calls(
    network: PreTrainedModel, attention: PagedAttention, num_tokens: int, context_length: int
) -> dict[nn.Module, _Call]:
    """Returns the calls of all modules that are given cosines and sines, in the order in which they
    end, in a forward pass over positions from the first to the last. A module that is called twice
    is another module."""
    calls: dict[nn.Module, _Call] = {}
    begun: dict[nn.Module, int] = {}
    num_attended = 0
    twice: set[nn.Module] = set()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal num_attended
        num_attended += 1
        return _nothing(q, k, v)

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module in begun:
            twice.add(module)
        begun[module] = num_attended

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if isinstance(kwargs.get(EMBEDDINGS), tuple):
            calls[module] = _Call(args, kwargs, begun[module], result)

    hooks = [module.register_forward_pre_hook(begin) for module in network.modules()]
    hooks += [module.register_forward_hook(end, with_kwargs=True) for module in network.modules()]
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=network.device)
    positions = torch.linspace(0, context_length - 1, num_tokens).long()[None].to(network.device)
    try:
        with attention.replaced(attend):
            network(input_ids=tokens, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {module: call for module, call in calls.items() if module not in twice}


def _join(calls: Mapping[nn.Module, _Call], attention: PagedAttention, rooms: LayerRooms) -> None:
    """Joins layers of one kind, each of which is given what the one before it gives."""
    runs: list[list[tuple[ShortLayer, LayerWeights]]] = []
    last: tuple[_Call, object] | None = None
    for module, call in calls.items():
        layer = module.forward
        if not isinstance(layer, ShortLayer):
            continue
        weights = _weights(layer.parts)
        if weights is None:
            last = None
            continue
        kind = (weights.kind, id(call.kwargs[EMBEDDINGS]), attention.scores(call.first).scale)
        follows = (
            last is not None
            and last[1] == kind
            and last[0].result is call.hidden_states
            and last[0].first + 1 == call.first
        )
        if not follows:
            runs.append([])
        runs[-1].append((layer, weights))
        last = call, kind
    for layers in runs:
        run = Run(NativeLayers([weights for _, weights in layers], rooms))
        for index, (layer, _) in enumerate(layers):
            layer.join(run, is_first=not index, is_last=index + 1 == len(layers))


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(*q.shape[:2], v.shape[2])


def _noise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*q.shape[:2], v.shape[2], generator=generator).to(q.device, q.dtype)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A module with the arguments of a call, over rows x [1, T, hidden]."""

    module: nn.Module
    call: _Call
    x: Tensor
    attention: PagedAttention

    def run(self, forward: Callable[..., Any], attend: Attend) -> tuple[list[Tensor], Any]:
        """Returns what reached the attention, [T, heads, ...] each, and the result."""
        seen: list[Tensor] = []

        def record(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.extend(part.clone() for part in (q, k, v))
            return attend(q, k, v)

        args, kwargs = self.call.args, self.call.kwargs
        if args:
            args = (self.x, *args[1:])
        else:
            kwargs = kwargs | {"hidden_states": self.x}
        with self.attention.replaced(record):
            return seen, forward(*args, **kwargs)

    def agrees(self, short: Callable[..., Any]) -> bool:
        """Returns whether `short` gives the same to the attention, and the same result, as the
        module's own code, whatever the attention gives."""
        for attend in (_nothing, _noise):
            try:
                seen, result = self.run(short, attend)
            except Exception as error:  # of a kernel or its compiler
                leave_to_torch(error, self.x.device)
                return False
            own_seen, own_result = self.run(self.module.forward, attend)
            if isinstance(result, tuple):
                if not isinstance(own_result, tuple) or len(own_result) != 2:
                    return False
                (result, _), (own_result, weights) = result, own_result
                if weights is not None:
                    return False
            if not isinstance(own_result, Tensor) or len(seen) != len(own_seen):
                return False
            pairs = zip([*seen, result], [*own_seen, own_result], strict=True)
            if not all(are_close(found, expected) for found, expected in pairs):
                return False
        return True


def _as_attention(trial: _Trial, ops: Ops) -> ShortAttention | None:
    """Returns a shorter forward pass; None where the module's own code is to stay."""
    module = trial.module
    children = [child for child in module.children() if isinstance(child, ProductModule)]
    products = list(dict.fromkeys(child.product for child in children))
    if len(products) != 2 or len(children) != sum(len(product.sizes) for product in products):
        return None
    seen, _ = trial.run(module.forward, _nothing)
    if len(seen) != 3 or trial.attention.has_sinks(trial.call.first):
        return None
    (_, num_heads, dim), (_, num_kv_heads, _), (_, _, value_dim) = (part.shape for part in seen)
    norms = [child.norm for child in module.children() if isinstance(child, NormModule)]
    if (
        value_dim != dim
        or [len(norm.weight) for norm in norms] not in ([], [dim, dim])
        or any(
            part.shape != (1, len(seen[0]), dim) or part.dtype != trial.x.dtype
            for part in trial.call.kwargs[EMBEDDINGS]
        )
    ):
        return None
    for qkv, output in (products, products[::-1]):
        inner = next(child.in_features for child in children if child.product is output)
        if sum(qkv.sizes) != (num_heads + 2 * num_kv_heads) * dim or inner != num_heads * dim:
            continue
        parts = AttentionParts(
            qkv=qkv,
            output=output,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            norm=HeadNorm(*norms) if norms else None,
        )
        short = ShortAttention(module.forward, parts, ops, trial.attention)
        if trial.agrees(short):
            return short
    return None


_NORMS: Sequence[tuple[str, ...]] = (
    ("input_layernorm", "post_attention_layernorm"),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)


def _as_layer(trial: _Trial, ops: Ops) -> ShortLayer | None:
    """Returns a shorter forward pass; None where the layer's own code is to stay."""
    norms: dict[str, Norm] = {}
    shorts: list[ShortAttention] = []
    others: list[nn.Module] = []
    for name, child in trial.module.named_children():
        if isinstance(child, NormModule):
            norms[name] = child.norm
        elif isinstance(child.forward, ShortAttention):
            shorts.append(child.forward)
        elif not isinstance(child, _WITHOUT_PARTS):
            others.append(child)
    if tuple(norms) not in _NORMS or len(shorts) != 1 or len(others) != 1:
        return None
    first, second, *more = norms.values()
    parts = LayerParts(
        attention_norm=first,
        attention_output_norm=second if more else None,
        mlp_norm=more[0] if more else second,
        mlp_output_norm=more[1] if more else None,
        attention=shorts[0],
        mlp=others[0],
    )
    short = ShortLayer(trial.module.forward, parts, ops, trial.attention)
    return short if trial.agrees(short) else None


def _weights(parts: LayerParts) -> LayerWeights | None:
    """Returns the layer as the kernels know it; None where they do not compute all its parts."""
    if not isinstance(parts.mlp, GatedModule):
        return None
    attention, mlp = parts.attention.parts, parts.mlp
    products = [attention.qkv.multiply, attention.output.multiply, mlp.gated, mlp.down]
    native = [one for one in products if isinstance(one, NativeProduct)]
    if len(native) < len(products):
        return None
    qkv, output, gate_up, down = native
    weights = LayerWeights(
        attention_norm=parts.attention_norm,
        attention_output_norm=parts.attention_output_norm,
        mlp_norm=parts.mlp_norm,
        mlp_output_norm=parts.mlp_output_norm,
        head_norm=attention.norm,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
    )
    return weights if weights.has_one_norm else None

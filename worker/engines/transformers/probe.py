"""What a model's attention is, found by a forward pass that computes nothing.

The model is built without memory (on torch's meta device) and run over a few tokens. Its attention
arrives here, through transformers' public attention interface, as often as it has layers: with the
shapes of keys and values, the scale, and a stand-in for the mask. So a model that cannot be served
is refused before its weights are read, and the KV cache is sized for what the model really keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from worker.engines.transformers.config import SERVED_ELSEWHERE, TransformersConfig
from worker.engines.transformers.masks import MaskShape
from worker.engines.transformers.products import LinearCall, groups_of, replace_linears
from worker.model.base import KVLayer, LayerScores, Multiply, Reach
from worker.model.errors import UnsupportedModel
from worker.model.layers.ops import TorchOps

log = logging.getLogger(__name__)

_NAME = "penstock-probe"
_NUM_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention in a forward pass: what it keeps, and how it weighs."""

    kept: KVLayer
    scores: LayerScores
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """What one forward pass does."""

    calls: tuple[AttentionCall, ...]  # in order
    linear_groups: tuple[tuple[str, ...], ...]  # names of linear modules with one input


def probe(config: TransformersConfig) -> Probe:
    """Returns what one forward pass does. Raises UnsupportedModel."""
    recorder = _Recorder(config)
    AttentionInterface.register(_NAME, recorder.attend)
    AttentionMaskInterface.register(_NAME, recorder.mask)
    try:
        with torch.device("meta"), torch.inference_mode():
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config.hugging_face,
                attn_implementation=_NAME,
                # The others look at the data to see which experts have tokens.
                experts_implementation="batched_mm",
                trust_remote_code=False,
            )
            linear_calls = _watch_linears(model)
            positions = torch.arange(_NUM_TOKENS)[None]
            with _Reads(positions) as reads:
                logits = _run(model, position_ids=positions)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever that model's own code does with what it lacks
        extra = {"model_type": config.model_type, "reason": f"{type(error).__name__}: {error}"}
        log.info("the probe of a model failed", extra=extra)
        raise UnsupportedModel(
            f"model_type {config.model_type!r} does not leave its attention, masks and positions "
            f"to transformers' attention interface alone; {SERVED_ELSEWHERE}"
        ) from error
    recorder.check()
    if not reads.was_read:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} counts the positions of a batch by itself, where "
            f"each sequence has its own; {SERVED_ELSEWHERE}"
        )
    if logits.shape[-1] != config.vocab_size:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} has {logits.shape[-1]} logits for a vocab_size of "
            f"{config.vocab_size}"
        )
    calls = tuple(recorder.calls)
    return Probe(calls, _groups_that_fit(model, groups_of(linear_calls)))


class _Reads(TorchFunctionMode):
    """Notes whether an operation is given a tensor while this is the mode."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.was_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        self.was_read = self.was_read or any(one is self._tensor for one in given)
        return func(*args, **(kwargs or {}))


def _run(model: torch.nn.Module, **kwargs: Tensor) -> Tensor:
    """Returns the logits of a pass over a few tokens."""
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    # Without a padding mask some look into the positions for packed sequences.
    output = model(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **kwargs
    )
    logits: Tensor = output.logits
    return logits


def _watch_linears(model: torch.nn.Module) -> list[LinearCall]:
    """Returns a list that gets the calls of all linear modules."""
    calls: list[LinearCall] = []
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: calls.append(LinearCall(name, inputs[0]))
            )
    return calls


class _Shapes(TorchOps):
    """Products without numbers."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        return lambda x: x.new_empty(len(x), len(weight))


def _groups_that_fit(
    model: torch.nn.Module, groups: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], ...]:
    """Returns the groups, each module by itself where its code cannot do with part of a product:
    parts are no contiguous tensors."""
    replace_linears(model, groups, _Shapes(), model.dtype)  # type: ignore[arg-type]
    try:
        with torch.device("meta"), torch.inference_mode():
            _run(model)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        log.info("the model's products are not fused", extra={"reason": reason})
        return tuple((name,) for group in groups for name in group)
    return groups


class _Recorder:
    """Stands in for attention and masks of one forward pass."""

    def __init__(self, config: TransformersConfig) -> None:
        self._config = config
        self._text = config.hugging_face.get_text_config(decoder=True)
        self.calls: list[AttentionCall] = []

    def mask(self, *, mask_function: Any, **others: Any) -> MaskShape:
        return MaskShape(mask_function)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer_index = getattr(module, "layer_idx", None)
        reach = self._reach(layer_index, attention_mask, kwargs)
        self.calls.append(
            AttentionCall(
                kept=KVLayer(
                    key.shape[1], key.shape[3], value.shape[3], reach.window or reach.chunk
                ),
                scores=LayerScores(
                    scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
                    softcap=kwargs.get("softcap"),
                    reach=reach,
                ),
                has_sinks=kwargs.get("s_aux") is not None,
            )
        )
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _reach(
        self, layer_index: int | None, attention_mask: object, kwargs: Mapping[str, Any]
    ) -> Reach:
        """Returns the reach of the mask; of the arguments where no mask was made."""
        types = getattr(self._text, "layer_types", None)
        is_chunked = (
            types is not None
            and layer_index is not None
            and types[layer_index] == "chunked_attention"
        )
        if is_chunked:  # its mask function computes on the model's device, where there is no data
            return Reach(chunk=int(self._text.attention_chunk_size))
        reach: Reach | None = Reach(window=kwargs.get("sliding_window"))
        if isinstance(attention_mask, MaskShape):
            reach = attention_mask.reach(self._config.context_length)
        elif attention_mask is not None:
            reach = None
        if reach is None:
            raise UnsupportedModel(
                f"model_type {self._config.model_type!r} has an attention that is not causal, or a "
                f"mask of its own, which this engine does not compute; {SERVED_ELSEWHERE}"
            )
        return reach

    def check(self) -> None:
        """Raises UnsupportedModel where a layer's attention did not arrive here."""
        num_layers = int(self._text.num_hidden_layers)
        if len(self.calls) < num_layers:
            raise UnsupportedModel(
                f"model_type {self._config.model_type!r} computes {len(self.calls)} of "
                f"{num_layers} layers' attention through transformers' attention interface; "
                f"{SERVED_ELSEWHERE}"
            )

"""CausalLM: embedding, decoder layers, final norm and output matrix, over a flat token batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from worker.model.base import AttentionBackend, AttentionMetadata, DecoderStack, Share
from worker.model.config.model_config import ModelConfig
from worker.model.layers.linear import Embedding, Linear, RMSNorm, TiedHead
from worker.model.layers.linear_method import LinearMethod, LinearMethods, Place
from worker.model.layers.ops import HeadNorm, Norm, Ops, Rotation, Step, TorchOps
from worker.model.layers.rotary import RotaryEmbedding
from worker.model.parallel.group import Placement


class Attention(nn.Module):
    """Grouped-query self-attention; queries and keys may be normalised per head."""

    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__()
        self.layer = layer
        heads = placement.group.heads(config.num_heads)
        kv_heads = placement.group.kv_heads(config.num_kv_heads)
        self.num_heads = heads.size
        self.num_kv_heads = kv_heads.size
        self.head_dim = config.head_dim
        hidden = Share.all_of(config.hidden_size)
        queries = heads.times(config.head_dim)
        keys = kv_heads.times(config.head_dim)
        self.qkv = Linear(
            hidden,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=config.attention_bias,
            placement=placement,
        )
        self.output = Linear(
            queries,
            {"o_proj": hidden},
            bias=config.output_bias,
            placement=placement,
        )
        self.kind = config.layers[layer]
        self.q_norm = self.k_norm = self.head_norm = None
        if config.has_qk_norm:
            self.q_norm = _norm(config, config.head_dim, placement)
            self.k_norm = _norm(config, config.head_dim, placement)
            self.head_norm = HeadNorm(self.q_norm.norm, self.k_norm.norm)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Maps [num_tokens, hidden] to the same shape; writes keys and values to the cache."""
        rotation = step.local_rotation if self.kind.is_local else step.rotation
        queries, keys, values = step.ops.rotate(
            self.qkv(x),
            self.num_heads,
            self.num_kv_heads,
            self.head_norm,
            rotation.cos,
            rotation.sin,
        )
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        step.backend.store(self.layer, keys, values)
        step.backend.attend(self.layer, queries, out)
        output: Tensor = self.output(out.view(x.shape[0], -1))
        return output


class GatedMLP(nn.Module):
    """The gated feed-forward block (arXiv:2002.05202): down(activation(gate(x)) * up(x)).

    gate and up are one matrix.
    """

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        super().__init__()
        hidden, bias = Share.all_of(config.hidden_size), config.mlp_bias
        inner = placement.group.features(config.intermediate_size)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(
            hidden, parts, bias=bias, activation=config.activation, placement=placement
        )
        self.down = Linear(inner, {"down_proj": hidden}, bias=bias, placement=placement)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [num_tokens, hidden] to the same shape."""
        output: Tensor = self.down(self.gate_up(x))
        return output


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream; with output norms
    what they give is normalised first.

    Attributes have the names of the checkpoint; see CausalLM.named_tensors.
    """

    def __init__(self, config: ModelConfig, layer: int, *, placement: Placement) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = _norm(config, hidden, placement)
        self.self_attn = Attention(config, layer, placement=placement)
        # After attention where there are output norms, else before the feed-forward.
        self.post_attention_layernorm = _norm(config, hidden, placement)
        self.mlp = GatedMLP(config, placement=placement)
        self.pre_feedforward_layernorm = self.post_feedforward_layernorm = None
        if config.has_output_norms:
            self.pre_feedforward_layernorm = _norm(config, hidden, placement)
            self.post_feedforward_layernorm = _norm(config, hidden, placement)

    @property
    def mlp_norm(self) -> Norm:
        """The norm of the residual stream, before the feed-forward."""
        return (self.pre_feedforward_layernorm or self.post_attention_layernorm).norm

    @property
    def attention_output_norm(self) -> Norm | None:
        """The norm of the attention's output."""
        has_own = self.pre_feedforward_layernorm is not None
        return self.post_attention_layernorm.norm if has_own else None

    @property
    def mlp_output_norm(self) -> Norm | None:
        """The norm of the feed-forward's output."""
        norm = self.post_feedforward_layernorm
        return None if norm is None else norm.norm

    def forward(
        self, x: Tensor, delta: Tensor | None, delta_norm: Norm | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream and the addition due to it, both [num_tokens, hidden].

        That addition's norm is `mlp_output_norm`, as `delta_norm` is that of `delta`.
        """
        x, normed = step.ops.add_norm(x, delta, self.input_layernorm.norm, delta_norm)
        attended = self.self_attn(normed, step)
        x, normed = step.ops.add_norm(x, attended, self.mlp_norm, self.attention_output_norm)
        return x, self.mlp(normed)


def _norm(config: ModelConfig, size: int, placement: Placement) -> RMSNorm:
    return RMSNorm(size, config.rms_norm_eps, adds_one=config.norms_add_one, placement=placement)


def _prefix(path: str) -> str:
    """Returns what stands before the names of a Linear's parts in the checkpoint."""
    parent = path.rpartition(".")[0]
    return f"model.{parent}." if parent else ""


class CausalLM(nn.Module):
    """A decoder-only language model whose parameters are still empty.

    It computes positions below `max_model_len`. What families differ in stands in the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        placement: Placement,
        ops: Ops | None = None,
        stored: Mapping[str, LinearMethod] | None = None,
    ) -> None:
        """`ops` compute the layers from `finish` on; None: TorchOps. `stored` has the methods of
        weights that are kept as the checkpoint has them, by its names."""
        super().__init__()
        self.config = config
        self.placement = placement
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(
            vocab, hidden, scale=config.embedding_scale, placement=placement
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, placement=placement) for layer in range(config.num_layers)
        )
        self.norm = _norm(config, hidden, placement)
        self.head: TiedHead | Linear = TiedHead(self.embed_tokens)
        if not config.tie_word_embeddings:
            parts = {"lm_head": placement.group.tokens(vocab)}
            self.head = Linear(Share.all_of(hidden), parts, bias=False, placement=placement)
        self.rope = RotaryEmbedding(
            config.rope, config.head_dim, max_model_len, placement=placement
        )
        self.local_rope = self.rope
        if config.local_rope is not None:
            self.local_rope = RotaryEmbedding(
                config.local_rope, config.head_dim, max_model_len, placement=placement
            )
        self.methods = LinearMethods(ops or TorchOps(), stored or {})
        for path, module in self.named_modules():
            if isinstance(module, Linear):
                names = [f"{_prefix(path)}{name}.weight" for name in module.shape.parts]
                module.create(self.methods.choose(names, module.shape))
        self._num_parameters = sum(math.prod(p.whole_shape) for _, p in self.named_tensors())
        self._finished_ops = ops or TorchOps()
        self._ops: Ops = TorchOps()

    def finish(self) -> None:
        """Computes with the ops and the methods from now on: the weights are loaded, and theirs."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.finish()
            elif isinstance(module, TiedHead):
                module.finish(self.methods.dense)
        self._ops = self._finished_ops

    def forward(self, token_ids: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
        """Returns final hidden states [num_tokens, hidden] of `token_ids` and `positions`
        [num_tokens].

        `backend` has been prepared for exactly these tokens. The result holds until the next call.
        """
        rotation = local = Rotation(*self.rope.at(positions))
        if self.local_rope is not self.rope:
            local = Rotation(*self.local_rope.at(positions))
        step = Step(self._ops, backend, rotation, local)
        x: Tensor = self.embed_tokens(token_ids)
        delta: Tensor | None = None
        delta_norm: Norm | None = None
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            x, delta = layer(x, delta, delta_norm, step)
            delta_norm = layer.mlp_output_norm
        _, normed = self._ops.add_norm(x, delta, self.norm.norm, delta_norm)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [rows, vocab] in the model's dtype, valid until the next call.

        `hidden` is [rows, hidden]. Ranks but the first return their part of the vocabulary.
        """
        return self.placement.group.gather(self.head(hidden), self.config.vocab_size)

    def named_tensors(self) -> Iterator[tuple[str, Place]]:
        """Yields each checkpoint name that this model needs, with the place that it fills.

        The names follow from the attributes. Only the output matrix is not below `model.`.
        """
        for path, module in self.named_modules():
            if isinstance(module, Linear):
                yield from module.named_tensors(_prefix(path))
            elif isinstance(module, Embedding | RMSNorm):
                yield from module.named_tensors(f"model.{path}.weight")

    @property
    def num_parameters(self) -> int:
        """The whole model's, whatever part of it this rank has."""
        return self._num_parameters


class LayerByLayer:
    """A DecoderStack of the model's own layers; the specification of the faster ones."""

    def __init__(self, model: CausalLM, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        self._backend.prepare(metadata)
        hidden: Tensor = self._model(token_ids, positions, self._backend)
        return hidden.index_select(0, rows)


class StackByRows:
    """A DecoderStack of two over the same model and pool."""

    def __init__(self, few: DecoderStack, many: DecoderStack, many_rows: int) -> None:
        """`many` computes steps of `many_rows` tokens and more."""
        self._few = few
        self._many = many
        self._many_rows = many_rows

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        stack = self._many if metadata.num_tokens >= self._many_rows else self._few
        return stack(token_ids, positions, metadata, rows)

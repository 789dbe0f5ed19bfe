"""attend: scaled dot product attention, with what torch's own operator lacks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.model.base import LayerScores

_MAX_SCORES = 1 << 26  # held at once, in float32


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scores: LayerScores,
    *,
    mask: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns [batch, heads, n, value_dim] of queries [batch, heads, n, key_dim], keys [batch,
    heads, m, key_dim] and values [batch, heads, m, value_dim].

    `mask` broadcasts to [batch, heads, n, m] and is True where attended; None: plainly causal, with
    m = n. `sinks` broadcast to [batch, heads, n, 1].
    """
    if scores.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scores.scale
        )
    num_queries, num_keys = queries.shape[-2], keys.shape[-2]
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=keys.device).tril()
    hidden = ~mask
    step = max(1, _MAX_SCORES // (queries.shape[0] * queries.shape[1] * num_keys))
    parts = []
    for start in range(0, num_queries, step):
        rows = slice(start, start + step)
        parts.append(
            _attend_some(
                queries[..., rows, :],
                keys,
                values,
                scores,
                hidden if hidden.shape[-2] == 1 else hidden[..., rows, :],
                sinks if sinks is None or sinks.shape[-2] == 1 else sinks[..., rows, :],
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _attend_some(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scores: LayerScores,
    hidden: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Computes as `attend` does, with all scores in memory; `hidden` is True where not attended."""
    scale = queries.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    products = (queries @ keys.transpose(-1, -2)).float() * scale
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    products = products.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.float().expand(*products.shape[:-1], 1)
        weights = torch.cat((products, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = products.softmax(dim=-1)
    return weights.to(values.dtype) @ values

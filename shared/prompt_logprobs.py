"""Log probabilities of a prompt as the bytes of `PromptSlice.entries`: neither the transport nor a
reader that did not request them decodes these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from shared.messages import PromptLogprob

_prompt_decoder = msgspec.json.Decoder(
    list[tuple[int, float | None, int, tuple[tuple[int, float | None], ...]]]
)


def encode_prompt_logprobs(entries: Sequence[PromptLogprob]) -> bytes:
    """Returns JSON: token id, log probability, rank, alternatives; minus infinity is null."""
    return msgspec.json.encode(entries)


def decode_prompt_logprobs(text: bytes) -> list[PromptLogprob]:
    """Decodes entries. Raises ValueError for anything but a list of entries."""
    return [
        PromptLogprob(
            token_id, _number(logprob), rank, tuple((other, _number(value)) for other, value in top)
        )
        for token_id, logprob, rank, top in _prompt_decoder.decode(text)
    ]


def _number(logprob: float | None) -> float:
    return -math.inf if logprob is None else logprob

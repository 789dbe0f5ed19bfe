"""When a sequence has said enough: stops that tokens alone can decide.

Stop strings need text, which the engine does not have: whoever detokenizes looks for them and
cancels.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from shared.messages import FinishReason
from worker.engine.sequence import Sequence


class Stop(NamedTuple):
    """Why a sequence ends. `token_id` is the stop token that matched; None for EOS and length."""

    reason: FinishReason
    token_id: int | None = None


def find_stop(sequence: Sequence, eos_token_ids: Set[int]) -> Stop | None:
    """Looks at the newest output token only: call it after every token.

    EOS goes before stop token ids, both before length. Neither of the first two ends a sequence
    that has fewer than `min_tokens` outputs (the sampler keeps them from being drawn until then).
    EOS behind a whole grammar always ends it: the sampler draws it there when nothing else is left.
    """
    params = sequence.params
    num_outputs = sequence.num_output_tokens
    if num_outputs == 0:
        return None
    token_id = sequence.output_token_ids[-1]
    wants_more = num_outputs < params.min_tokens
    if token_id in eos_token_ids:
        held_back = wants_more or params.ignore_eos
        if params.grammar is not None or not held_back:
            return Stop(FinishReason.STOP)
    if token_id in params.stop_token_ids and not wants_more:
        return Stop(FinishReason.STOP, token_id)
    if sequence.num_tokens >= sequence.max_num_tokens:
        return Stop(FinishReason.LENGTH)
    return None

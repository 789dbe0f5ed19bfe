"""The stop rules that token ids alone can decide.

Stop strings need text, which the engine does not have: the code that detokenizes looks for them and
cancels the request.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from shared.messages import FinishReason, SamplingParams


class StopMatch(NamedTuple):
    """Why an output ends. `token_id` is the stop token that matched; None for EOS and length."""

    reason: FinishReason
    token_id: int | None = None


def find_stop(
    output_token_ids: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Set[int],
    max_output_tokens: int,
) -> StopMatch | None:
    """Returns the stop that the newest output token has reached; None if the output continues.

    EOS takes precedence over stop token ids, both over length. Neither of the first two ends an
    output of fewer than `min_tokens` tokens (the sampler does not draw them until then). EOS after
    a complete grammar always ends it: the sampler draws it there when nothing else is left.
    """
    num_outputs = len(output_token_ids)
    if num_outputs == 0:
        return None
    token_id = output_token_ids[-1]
    is_below_minimum = num_outputs < params.min_tokens
    if token_id in eos_token_ids:
        is_ignored = is_below_minimum or params.ignore_eos
        if params.grammar is not None or not is_ignored:
            return StopMatch(FinishReason.STOP)
    if token_id in params.stop_token_ids and not is_below_minimum:
        return StopMatch(FinishReason.STOP, token_id)
    if num_outputs >= max_output_tokens:
        return StopMatch(FinishReason.LENGTH)
    return None

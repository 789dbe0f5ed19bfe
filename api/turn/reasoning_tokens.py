"""ReasoningTokens: how many of a choice's tokens are reasoning."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from shared.text.base import Tokenizer


class ReasoningTokens:
    """Counts exactly, by where in the text each token begins; nothing is encoded again.

    A marker's tokens count, and a token without text of its own counts where it stands.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._starts = array("q")  # in bytes
        self._num_bytes = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """All of the choice's tokens, in order: where the reasoning ends is known only later."""
        for token_id in token_ids:
            self._starts.append(self._num_bytes)
            self._num_bytes += len(self._detokenizer.push((token_id,)).encode())

    def count(self, reasoning_bytes: int) -> int:
        """Tokens that begin in the first `reasoning_bytes` of the text (a TurnParser's)."""
        return bisect_left(self._starts, reasoning_bytes)

"""TokenPieces: a log's text cut anew, at the ends of its tokens.

How a log's tokens were gathered into entries, and how a relay delivered these, is chance: an entry
may hold one token or many, an outage may have it written anew. What is numbered for a client must
not depend on that, so the text is cut where its tokens end, whatever it came in.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from api.generation.logprobs import ChatEntryForm, PlacedLogprob
from shared.messages import Delta, TokenLogprob
from shared.text.base import Tokenizer

Placed = PlacedLogprob[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """The text of a token, after tokens that have none by themselves (parts of a character)."""

    text: str
    placed: tuple[Placed, ...] = ()


class TokenPieces:
    """Pieces of one text. The same tokens and text give the same pieces, however they are pushed.

    A piece is given when all its text is there. The text is the log's; of the tokenizer only the
    lengths are used, so that a tokenizer that is not the writer's moves cuts and loses nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._text = b""  # not given yet
        self.num_given = 0  # bytes
        self.num_bytes = 0  # of all text so far
        self._num_chars = 0  # of the tokens so far
        self._ends = array("q", (0,))  # of each token, in bytes of the text, after the start
        self._next = 1  # index into `_ends` of the first token that no piece was given for
        self._held: deque[Placed] = deque()
        self._form = ChatEntryForm(tokenizer)

    def push(self, delta: Delta) -> Iterator[TokenPiece]:
        """The pieces that this completes. Take all of them before the next push."""
        self._text += delta.text.encode()
        self.num_bytes += len(delta.text.encode())
        for index, token_id in enumerate(delta.token_ids):
            self._place(token_id, None if delta.logprobs is None else delta.logprobs[index])
        while self._next < len(self._ends) and self._ends[self._next] <= self.num_bytes:
            end = self._ends[self._next]
            self._next += 1
            if piece := self._cut(end):
                yield piece

    def rest(self, *, stopped: bool) -> TokenPiece:
        """What is left when the text has ended; possibly nothing.

        After a stop, tokens that begin where the text ends stand for nothing that was shown (the
        stop string, the end token) and are dropped.
        """
        end = self.num_bytes
        placed = tuple(
            msgspec.structs.replace(
                held, start_bytes=min(held.start_bytes, end), end_bytes=min(held.end_bytes, end)
            )
            for held in self._held
            if not stopped or held.start_bytes < end
        )
        self._held.clear()
        text = self._text.decode(errors="replace")
        self._text = b""
        self.num_given = self.num_bytes
        self._next = len(self._ends)
        return TokenPiece(text, placed)

    def num_tokens_before(self, num_bytes: int) -> int:
        """How many tokens begin in the first bytes of the text."""
        return bisect_left(self._ends, num_bytes, hi=len(self._ends) - 1)

    def _place(self, token_id: int, entry: TokenLogprob | None) -> None:
        text = self._detokenizer.push((token_id,))
        start = self._ends[-1]
        end = start + len(text.encode())
        self._ends.append(end)
        if entry is not None:
            self._held.append(PlacedLogprob(self._form(entry), start, end, self._num_chars))
        self._num_chars += len(text)

    def _cut(self, end: int) -> TokenPiece | None:
        """The piece up to `end`; None when a token adds no text."""
        size = end - self.num_given
        while 0 < size < len(self._text) and self._text[size] & 0xC0 == 0x80:
            size -= 1  # never within a character
        if size <= 0:
            return None
        text, self._text = self._text[:size].decode(), self._text[size:]
        self.num_given += size
        placed = []
        while self._held and self._held[0].end_bytes <= end and self._held[0].start_bytes < end:
            placed.append(self._held.popleft())
        return TokenPiece(text, tuple(placed))

"""Detokenizers: text of a growing token sequence, released as soon as it can no longer change."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

MAX_PENDING_TOKENS = 16


class ByteDetokenizer:
    """Detokenizer over bytes, exact for every vocabulary that has a PieceRule.

    `piece(token_id, first)` gives a token's bytes, or None for a token that is not part of the text
    (a skipped special token, an id outside the vocabulary). Bytes are held only while they are a
    proper prefix of a UTF-8 character: at most three.
    """

    def __init__(
        self,
        piece: Callable[[int, bool], bytes | None],
        *,
        strip: str = "",
        strip_count: int = 0,
    ) -> None:
        self._piece = piece
        self._decoder = _Utf8Decoder("replace")
        self._first = True
        self._strip = strip
        self._strip_left = strip_count

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            part = self._piece(token_id, self._first)
            if part is not None:
                self._first = False
                parts.append(part)
        return self._stripped(self._decoder.decode(b"".join(parts)))

    def flush(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDetokenizer:
    """Detokenizer over a library's own `decode`, for decoders whose rule is not known.

    Decodes a short window twice, with and without the newest tokens, and releases the difference
    unless it ends in U+FFFD, which may be half a character. After MAX_PENDING_TOKENS tokens without
    a release the text is taken as it is, so the window, and with it the cost of a push, is bounded.
    `is_text` says which tokens are part of the text at all.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_text: Callable[[int], bool]
    ) -> None:
        self._decode = decode
        self._is_text = is_text
        self._window: list[int] = []
        self._num_released = 0  # tokens of the window whose text has been released

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids if self._is_text(token_id)])

    def flush(self) -> str:
        return self._release(final=True)

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        num_pending = len(self._window) - self._num_released
        return self._release(final=num_pending >= MAX_PENDING_TOKENS)

    def _release(self, *, final: bool) -> str:
        known = self._decode(self._window[: self._num_released])
        text = self._decode(self._window)
        if not final and (len(text) <= len(known) or text.endswith("\ufffd")):
            return ""
        # What is released now stays as the context of the next step: it tells the decoder that
        # later tokens are not the first ones.
        self._window = self._window[self._num_released :]
        self._num_released = len(self._window)
        return text[len(known) :]

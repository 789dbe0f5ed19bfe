"""Detokenizers: text of a growing token sequence, released as soon as it can no longer change."""

from __future__ import annotations

import codecs
from collections import deque
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


# Stop strings: the first one in text that arrives in parts, with as little held as can be.


class StopStringMatcher:
    """Passes text through until one of `stops` is complete in it.

    The first stop string to be complete wins; of several that end at the same character the longest
    one does. Text from its first character on is dropped. The answer does not depend on how the
    text was cut into pushes. Held back is the longest end of the text that begins some stop string,
    so never more than the longest of them less one character; time is linear in the text.

    An Aho-Corasick automaton: a state is a prefix of a stop string, namely the longest one that the
    text so far ends in.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise ValueError("a stop string is not empty")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def held(self) -> str:
        """Text that was pushed and is neither released nor dropped yet."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to release, the stop string that matched or None).

        After a match every call returns ("", that match).
        """
        if self._matched is not None:
            return "", self._matched
        if len(self._next) == 1:
            return text, None
        pending = self._held + text
        state = self._state
        for end in range(len(self._held), len(pending)):
            state = self._step(state, pending[end])
            match = self._match[state]
            if match is not None:
                self._matched, self._held = match, ""
                return pending[: end + 1 - len(match)], match
        self._state = state
        num_safe = len(pending) - self._depth[state]
        self._held = pending[num_safe:]
        return pending[:num_safe], None

    def flush(self) -> str:
        """Returns the held text: nothing follows that could complete a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, character: str) -> int:
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fallback.append(0)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = stop

    def _link(self) -> None:
        """Breadth first: each state falls back to the longest proper suffix that is a state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fallback[following] = self._step(self._fallback[state], character)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fallback[following]]
                queue.append(following)

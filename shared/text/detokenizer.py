"""Detokenizers: text of a growing token sequence, released as soon as it can no longer change.

Also the stop strings in that text, and the bytes that one vocabulary entry stands for.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if data.isascii() and not self._decoder.buffer:
            text = data.decode("ascii")
        else:
            text = self._decoder.decode(data)
        return self._stripped(text) if self._strip_left else text

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
    a release all text is released, so the window, and with it the cost of a push, is bounded.
    `is_text` returns whether a token is part of the text.
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
        # The released tokens stay as the context of the next step: the decoder then treats later
        # tokens as not the first ones.
        self._window = self._window[self._num_released :]
        self._num_released = len(self._window)
        return text[len(known) :]


class StopStringMatcher:
    """Passes text through until one of `stops` is complete in it.

    The first stop string to be complete wins; of several that end at the same character the longest
    one does. Text from its first character on is dropped. The result does not depend on how the
    text was cut into pushes. The longest end of the text that starts some stop string is held back,
    never more than the longest of them less one character; time is linear in the text.

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
        """The text that was pushed and is neither released nor dropped yet."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text that is safe to release, the stop string that matched or None).

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
        """Links each state, breadth first, to the longest proper suffix that is a state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fallback[following] = self._step(self._fallback[state], character)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fallback[following]]
                queue.append(following)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_TextRule = Callable[[str, bool], str]


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the printable stand-ins of GPT-2's byte-level BPE: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How a vocabulary entry becomes bytes; pure, and the same on every thread.

    `tokenizers` decodes whole sequences only, and one that ends inside a character cannot be
    continued. Every decoder in use is, however, a rule per token that knows at most whether the
    token comes first, then "join, and drop a space at the start". In bytes that rule applies token
    by token: the one UTF-8 decoder after it reads the same bytes as from all tokens at once.

    `encode(token, first)` gives a token's bytes; `first` is true for the first token of the output
    that is not skipped. `strip` is a character of which up to `strip_count` are dropped from the
    start of the output.
    """

    encode: Callable[[str, bool], bytes]
    strip: str = ""
    strip_count: int = 0


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """Returns the rule of a decoder as tokenizer.json describes it; None for others.

    Known: no decoder, ByteLevel, Metaspace, WordPiece, and sequences of Replace (of a string),
    ByteFallback, ByteLevel, Metaspace or WordPiece, Fuse, and Strip from the left.
    """
    if decoder is None:
        return PieceRule(lambda token, first: (token if first else " " + token).encode())
    steps: Sequence[Mapping[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    rules: list[_TextRule] = []
    to_bytes: Callable[[str], bytes] | None = None
    fused = False
    strip, strip_count = "", 0
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and (fused or to_bytes is _byte_level) and not strip:
            if step["stop"]:
                return None
            strip, strip_count = step["content"], step["start"]
        elif fused or to_bytes is not None:
            return None  # a rule over joined text is not a rule per token
        elif kind == "ByteLevel":
            to_bytes = _byte_level
        elif kind == "ByteFallback":
            to_bytes = _byte_fallback
        else:
            rule = _text_rule(step)
            if rule is None:
                return None
            rules.append(rule)
    return PieceRule(_compose(rules, to_bytes or str.encode), strip, strip_count)


def _compose(
    rules: Sequence[_TextRule], to_bytes: Callable[[str], bytes]
) -> Callable[[str, bool], bytes]:
    def encode(token: str, first: bool) -> bytes:
        for rule in rules:
            token = rule(token, first)
        return to_bytes(token)

    return encode


def _text_rule(step: Mapping[str, Any]) -> _TextRule | None:
    if step["type"] == "Replace":
        pattern, content = step["pattern"].get("String"), step["content"]
        return None if pattern is None else lambda token, first: token.replace(pattern, content)
    if step["type"] == "Metaspace":
        return _metaspace(step["replacement"], step.get("prepend_scheme", "always") != "never")
    if step["type"] == "WordPiece":
        return _word_piece(step["prefix"], step["cleanup"])
    return None


def _metaspace(replacement: str, prepended: bool) -> _TextRule:
    def rule(token: str, first: bool) -> str:
        return token.replace(replacement, "" if first and prepended else " ")

    return rule


def _word_piece(prefix: str, cleanup: bool) -> _TextRule:
    def rule(token: str, first: bool) -> str:
        if not first:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        return _clean(token) if cleanup else token

    return rule


def _clean(text: str) -> str:
    """Applies WordPiece's English typography: no space before punctuation or a clitic."""
    for mark in (" .", " ?", " !", " ,"):
        text = text.replace(mark, mark[1:])
    text = text.replace(" ' ", "'").replace(" n't", "n't").replace(" 'm", "'m")
    text = text.replace(" do not", " don't")
    for clitic in (" 's", " 've", " 're"):
        text = text.replace(clitic, clitic[1:])
    return text


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:
        return token.encode()  # an added token outside the alphabet stands for itself


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()

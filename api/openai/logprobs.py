"""Log probabilities that keep step with the text, and the two shapes in which OpenAI shows them.

Text may be held back (a possible stop string, an open character) after its tokens are known. An
entry is released when the text of its token is, and never when that text was cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.messages import TokenLogprob
from shared.text.base import Tokenizer

LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class PlacedLogprob:
    """An entry and where the text of its token is: UTF-8 bytes and characters from the start."""

    entry: TokenLogprob
    start_bytes: int
    end_bytes: int
    start_chars: int


class LogprobAligner:
    """Holds entries until the text of their tokens was released."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._held: deque[PlacedLogprob] = deque()
        self._bytes = 0
        self._chars = 0

    def push(self, entries: Sequence[TokenLogprob], num_bytes: int) -> list[PlacedLogprob]:
        """Entries whose text is out, now that there are `num_bytes` of it."""
        for entry in entries:
            text = self._detokenizer.push((entry.token_id,))
            start_bytes, start_chars = self._bytes, self._chars
            self._bytes += len(text.encode())
            self._chars += len(text)
            self._held.append(PlacedLogprob(entry, start_bytes, self._bytes, start_chars))
        released = []
        # `<` for tokens without text: one at the end may be the token that stops, see `rest`.
        while self._held and (
            self._held[0].end_bytes <= num_bytes and self._held[0].start_bytes < num_bytes
        ):
            released.append(self._held.popleft())
        return released

    def rest(self, num_bytes: int, *, stopped: bool) -> list[PlacedLogprob]:
        """The entries left at the end of a text of `num_bytes`.

        After a stop, tokens that begin where the text ends stand for nothing that was shown (the
        stop string, the end token) and are dropped.
        """
        left = [held for held in self._held if not stopped or held.start_bytes < num_bytes]
        self._held.clear()
        return left


def chat_logprobs(placed: Sequence[PlacedLogprob], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """`choices[].logprobs` of the chat dialect; None without entries."""
    if not placed:
        return None
    content = [
        {
            **_token(tokenizer, item.entry.token_id, item.entry.logprob),
            "top_logprobs": [
                _token(tokenizer, token_id, logprob) for token_id, logprob in item.entry.top
            ],
        }
        for item in placed
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    placed: Sequence[PlacedLogprob], tokenizer: Tokenizer, num_top: int
) -> dict[str, Any] | None:
    """`choices[].logprobs` of the completion dialect; None without entries.

    `text_offset` counts characters of the answer. The chosen token is always among
    `top_logprobs`, so there may be one more than asked for.
    """
    if not placed:
        return None
    top = []
    for item in placed:
        best = {
            _spelled(tokenizer, token_id): _finite(logprob)
            for token_id, logprob in reversed(item.entry.top)
        }
        best[_spelled(tokenizer, item.entry.token_id)] = _finite(item.entry.logprob)
        top.append(dict(sorted(best.items(), key=lambda pair: -pair[1])))
    return {
        "tokens": [_spelled(tokenizer, item.entry.token_id) for item in placed],
        "token_logprobs": [_finite(item.entry.logprob) for item in placed],
        "top_logprobs": top if num_top else None,
        "text_offset": [item.start_chars for item in placed],
    }


def _spelled(tokenizer: Tokenizer, token_id: int) -> str:
    """OpenAI's spelling where tokens are keys: parts of a character must not look all the same."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

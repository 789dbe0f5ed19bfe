"""Log probabilities that keep step with the text, and the two shapes in which OpenAI shows them.

Text may be held back (a possible stop string, an open character) after its tokens are known. An
entry is released when the text of its token is, and never when that text was cut off.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypedDict, TypeVar

import msgspec

from shared.messages import TokenLogprob
from shared.text.base import Tokenizer

LOWEST = -9999.0  # JSON has no infinity

_encoder = msgspec.json.Encoder()

EntryT = TypeVar("EntryT")
EntryT_co = TypeVar("EntryT_co", covariant=True)


class PlacedLogprob(msgspec.Struct, Generic[EntryT], frozen=True, gc=False):
    """An entry and where the text of its token is: UTF-8 bytes and characters from the start."""

    entry: EntryT
    start_bytes: int
    end_bytes: int
    start_chars: int


class EntryForm(Protocol[EntryT_co]):
    """How a dialect keeps a token's entry until it is shown."""

    def __call__(self, entry: TokenLogprob, /) -> EntryT_co: ...


class _Token(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: msgspec.Raw


class _SampledToken(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: msgspec.Raw
    top_logprobs: list[_Token]


class ChatEntryForm:
    """Encodes entries as the JSON of a member of the chat dialect's `logprobs.content`.

    Each entry is encoded as it comes: an answer with many of them is a concatenation in the end,
    and costs no more memory than its JSON. How a token id is spelled is looked up once per answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spelled: dict[int, tuple[str, msgspec.Raw]] = {}  # its text, its bytes as JSON

    def __call__(self, entry: TokenLogprob, /) -> msgspec.Raw:
        top = [_Token(*self._parts(token_id, logprob)) for token_id, logprob in entry.top]
        token = _SampledToken(*self._parts(entry.token_id, entry.logprob), top)
        return msgspec.Raw(_encoder.encode(token))

    def _parts(self, token_id: int, logprob: float) -> tuple[str, float, msgspec.Raw]:
        spelled = self._spelled.get(token_id)
        if spelled is None:
            text = self._tokenizer.token_text(token_id)
            encoded = msgspec.Raw(_encoder.encode(list(self._tokenizer.token_bytes(token_id))))
            spelled = self._spelled[token_id] = (text, encoded)
        return spelled[0], finite(logprob), spelled[1]


class CompletionEntry(msgspec.Struct, frozen=True, gc=False):
    """What the completion dialect shows of a token's entry."""

    token: str
    logprob: float
    top: msgspec.Raw | None  # JSON: token -> log probability, best first; None: not requested


class CompletionEntryForm:
    """Encodes entries as the members of the completion dialect's lists, as they come."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._spelled: dict[int, str] = {}

    def __call__(self, entry: TokenLogprob, /) -> CompletionEntry:
        token, logprob = self.spell(entry.token_id), finite(entry.logprob)
        top = None
        if self._num_top:
            best = {self.spell(token_id): finite(other) for token_id, other in entry.top[::-1]}
            best[token] = logprob
            top = msgspec.Raw(
                _encoder.encode(dict(sorted(best.items(), key=lambda pair: -pair[1])))
            )
        return CompletionEntry(token, logprob, top)

    def spell(self, token_id: int) -> str:
        """Returns OpenAI's spelling where tokens are keys: parts of a character must not look all
        the same."""
        spelled = self._spelled.get(token_id)
        if spelled is None:
            raw = self._tokenizer.token_bytes(token_id)
            try:
                spelled = raw.decode()
            except UnicodeDecodeError:
                spelled = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._spelled[token_id] = spelled
        return spelled


class TokenAligner(Generic[EntryT]):
    """Finds where in the text each token is, and holds entries until the text of theirs is there.

    Nothing is encoded again: a token's length is that of its own text. A token that has none by
    itself (a part of a character) stands where the next one begins.
    """

    def __init__(
        self, tokenizer: Tokenizer, form: EntryForm[EntryT] | None, num_chars: int = 0
    ) -> None:
        """`form` encodes entries; None: there are none. `num_chars`: shown before this text."""
        self._form = form
        self._detokenizer = tokenizer.detokenizer()
        self._held: deque[PlacedLogprob[EntryT]] = deque()
        self._ends = array("q", (0,))  # of each token, in bytes, behind the start of the first
        self._next = 1  # index into `_ends` of the next that `ends_up_to` yields
        self._num_chars = num_chars

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Places the next tokens; `logprobs` has an entry for each of them, or is empty."""
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.push((token_id,))
            start = self._ends[-1]
            end = start + len(text.encode())
            self._ends.append(end)
            if logprobs and self._form is not None:
                entry = self._form(logprobs[index])
                self._held.append(PlacedLogprob(entry, start, end, self._num_chars))
            self._num_chars += len(text)

    def ends_up_to(self, num_bytes: int) -> Iterator[int]:
        """Yields the end of each next token whose text is in the first `num_bytes`."""
        while self._next < len(self._ends) and self._ends[self._next] <= num_bytes:
            self._next += 1
            yield self._ends[self._next - 1]

    def release(self, num_bytes: int) -> list[PlacedLogprob[EntryT]]:
        """Returns the entries whose text is in the first `num_bytes`."""
        held, released = self._held, []
        # `<` for tokens without text: one at the end may be the token that stops, see `rest`.
        while held and held[0].end_bytes <= num_bytes and held[0].start_bytes < num_bytes:
            released.append(held.popleft())
        return released

    def rest(self, num_bytes: int, *, stopped: bool) -> list[PlacedLogprob[EntryT]]:
        """Returns the entries left at the end of a text of `num_bytes`, none of them beyond it.

        After a stop, tokens that begin where the text ends stand for nothing that was shown (the
        stop string, the end token) and are dropped.
        """
        left = [
            PlacedLogprob(
                held.entry,
                min(held.start_bytes, num_bytes),
                min(held.end_bytes, num_bytes),
                held.start_chars,
            )
            for held in self._held
            if not stopped or held.start_bytes < num_bytes
        ]
        self._held.clear()
        return left

    def num_tokens_before(self, num_bytes: int) -> int:
        """Returns how many tokens begin in the first `num_bytes`."""
        return bisect_left(self._ends, num_bytes, hi=len(self._ends) - 1)


class ChatLogprobs(TypedDict):
    """`choices[].logprobs` of the chat dialect."""

    content: Sequence[msgspec.Raw]
    refusal: None


def chat_logprobs(content: Sequence[msgspec.Raw]) -> ChatLogprobs | None:
    """Returns None without entries."""
    return {"content": content, "refusal": None} if content else None


class CompletionLogprobs(TypedDict):
    """`choices[].logprobs` of the completion dialect."""

    tokens: Iterable[str]
    token_logprobs: Iterable[float | None]  # None: the first token of a prompt
    top_logprobs: Iterable[msgspec.Raw | None] | None
    text_offset: Iterable[int]


def completion_logprobs(
    placed: Sequence[PlacedLogprob[CompletionEntry]],
) -> CompletionLogprobs | None:
    """Returns None without entries, else members that are made as they are read.

    `text_offset` counts characters of the answer. The chosen token is always among
    `top_logprobs`, so there may be one more than requested.
    """
    if not placed:
        return None
    has_top = placed[0].entry.top is not None
    return {
        "tokens": (item.entry.token for item in placed),
        "token_logprobs": (item.entry.logprob for item in placed),
        "top_logprobs": (item.entry.top for item in placed) if has_top else None,
        "text_offset": (item.start_chars for item in placed),
    }


def finite(logprob: float) -> float:
    """Returns what stands for a log probability in JSON."""
    return max(logprob, LOWEST)

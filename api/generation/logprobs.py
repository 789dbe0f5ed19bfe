"""Log probabilities, of the output and of the prompt, in the shapes that OpenAI and vLLM show.

Those of the output keep step with the text: see `api.generation.aligned_choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypedDict

import msgspec

from api.generation.choices import PlacedLogprob, TokenTexts
from shared.messages import (
    PROMPT_SLICE_TOKENS,
    Job,
    PromptLogprob,
    PromptSlice,
    TokenLogprob,
    num_slices_of,
)
from shared.prompt_logprobs import decode_prompt_logprobs

LOWEST = -9999.0  # JSON has no infinity

_encoder = msgspec.json.Encoder()


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

    def __init__(self, tokenizer: TokenTexts) -> None:
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

    def __init__(self, tokenizer: TokenTexts, num_top: int) -> None:
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
    """Returns a log probability that JSON can carry."""
    return max(logprob, LOWEST)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """vLLM's `prompt_logprobs` of one prompt: an item for each token, null for the first, else an
    object from token ids to log probability, rank and text."""

    prompt: ScoredPrompt
    num_top: int
    tokenizer: TokenTexts

    def payload(self) -> Iterator[dict[str, Any] | None]:
        """Yields an item for each token of the prompt, made as it is taken."""
        texts: dict[int, str] = {}
        for entry in self.prompt.all_entries():
            yield None if entry is None else self._item(entry, texts)

    def _item(self, entry: PromptLogprob, texts: dict[int, str]) -> dict[str, Any]:
        """Returns the prompt's own token first, then the most likely ones, best first."""
        ranked = {entry.token_id: (entry.rank, entry.logprob)}
        for rank, (token_id, logprob) in enumerate(entry.top[: self.num_top], 1):
            ranked.setdefault(token_id, (rank, logprob))
        item = {}
        for token_id, (rank, logprob) in ranked.items():
            if token_id not in texts:
                texts[token_id] = self.tokenizer.token_text(token_id)
            item[str(token_id)] = {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": texts[token_id],
            }
        return item


class EchoedLogprobs:
    """One prompt's part of the lists in `choices[].logprobs`, of completions with `echo` and
    `logprobs`. Lists are made as they are read."""

    def __init__(
        self, prompt: ScoredPrompt, text: str, tokenizer: TokenTexts, num_top: int
    ) -> None:
        """`text`: the part of the prompt that the answer repeats."""
        self._prompt = prompt
        self._text = text
        self._tokenizer = tokenizer
        self._form = CompletionEntryForm(tokenizer, num_top)
        self._num_top = num_top

    def before(self, output: CompletionLogprobs | None) -> CompletionLogprobs:
        """Returns the lists of the prompt, with those of the answer after them."""
        prompt = self._prompt
        lists = self._lists(prompt.token_ids, prompt.all_entries, self._offsets())
        if output is None:
            return lists
        top = lists["top_logprobs"]
        return {
            "tokens": chain(lists["tokens"], output["tokens"]),
            "token_logprobs": chain(lists["token_logprobs"], output["token_logprobs"]),
            "top_logprobs": None if top is None else chain(top, output["top_logprobs"] or ()),
            "text_offset": chain(lists["text_offset"], output["text_offset"]),
        }

    def parts(self) -> Iterator[CompletionLogprobs]:
        """Yields the lists in parts, to be read in their order."""
        prompt, offsets = self._prompt, self._offsets()
        for part in range(prompt.num_parts):
            token_ids = prompt.tokens(part)
            entries = partial(prompt.entries, part)
            yield self._lists(token_ids, entries, islice(offsets, len(token_ids)))

    def _lists(
        self,
        token_ids: Sequence[int],
        entries: Callable[[], Iterator[PromptLogprob | None]],
        offsets: Iterator[int],
    ) -> CompletionLogprobs:
        return {
            "tokens": map(self._form.spell, token_ids),
            "token_logprobs": (None if e is None else finite(e.logprob) for e in entries()),
            "top_logprobs": map(self._top, entries()) if self._num_top else None,
            "text_offset": offsets,
        }

    def _top(self, entry: PromptLogprob | None) -> msgspec.Raw | None:
        if entry is None:
            return None
        top = entry.top[: self._num_top]
        return self._form(TokenLogprob(entry.token_id, entry.logprob, top)).top

    def _offsets(self) -> Iterator[int]:
        """Yields where in the text each token begins; one that is not in it, as a token that the
        tokenizer adds in front, begins where the next one does."""
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        at = 0
        for token_id in self._prompt.token_ids:
            yield at
            piece = detokenizer.push((token_id,))
            if self._text.startswith(piece, at):
                at += len(piece)


class PromptSlices:
    """What one job computes of its prompt, as its log has it. Implements PromptScores.

    Filled by the reader of the job's log, before its first delta; read by the formatter.
    """

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self.slices: list[bytes] = []

    @property
    def is_complete(self) -> bool:
        return len(self.slices) == self.num_slices

    def take(self, part: PromptSlice) -> None:
        """Takes the next slice; one that was taken already changes nothing."""
        if part.index == len(self.slices) < self.num_slices:
            self.slices.append(part.entries)


class ScoredPrompt(PromptSlices):
    """The log probabilities of one job's prompt.

    Slices are kept as they came and decoded each time they are read: they take a tenth of the
    memory so, and decode faster than they are formatted.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(num_slices_of(len(token_ids) - 1))
        self.token_ids = token_ids

    @property
    def num_parts(self) -> int:
        """Returns the number of parts: slices, the first with the prompt's first token as well."""
        return max(1, self.num_slices)

    def tokens(self, part: int) -> Sequence[int]:
        """Returns the token ids of a part."""
        begin = part * PROMPT_SLICE_TOKENS + 1 if part else 0
        return self.token_ids[begin : (part + 1) * PROMPT_SLICE_TOKENS + 1]

    def entries(self, part: int) -> Iterator[PromptLogprob | None]:
        """Yields the entry of each token of a part; None for the first token of the prompt.

        Raises ValueError for a slice that cannot be read.
        """
        if part == 0:
            yield None
        if part < len(self.slices):
            yield from decode_prompt_logprobs(self.slices[part])

    def all_entries(self) -> Iterator[PromptLogprob | None]:
        """Yields the entry of each token of the prompt."""
        return chain.from_iterable(map(self.entries, range(self.num_parts)))


def scored_prompt(job: Job) -> ScoredPrompt | None:
    """Returns the collector of a prompt's log probabilities; None where none are requested."""
    if job.sampling.prompt_logprobs is None:
        return None
    return ScoredPrompt(job.prompt_token_ids)

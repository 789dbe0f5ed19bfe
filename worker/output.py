"""OutputProcessor: one job's tokens become text, with stop strings watched and hold-back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.messages import Cursor, ErrorCode, FinishReason, SamplingParams, TokenLogprob
from shared.text.base import Tokenizer
from shared.text.detokenizer import StopStringMatcher


class ReplayMismatch(Exception):
    """The logged tokens do not give the logged text: another tokenizer wrote the log."""

    code = ErrorCode.DETOKENIZER_MISMATCH


class OutputChunk(NamedTuple):
    """The addition of a step to a job: tokens, the text that they released, and an end.

    `finish_reason` is STOP, LENGTH or None; `stop_reason` the stop string or token id that matched.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputProcessor:
    """Text of one job, in order, from its first token or from where its log ends.

    The concatenated texts of all pieces equal the decoded whole, cut before the first stop string.
    Text before token number `min_tokens` does not count for stop strings. The token that ends a job
    (EOS or a stop token id) is counted, its text is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopStringMatcher(sampling.stop) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._owed = ""  # replayed text that the log does not have yet
        self.num_tokens = 0

    def replay(
        self, token_ids: Sequence[int], logged: Cursor, *, ends_by_token: bool = False
    ) -> OutputChunk:
        """Replays a logged history. Returns a piece without tokens: a stop, if the text completes
        one.

        `ends_by_token`: the last token is the EOS or stop token, whose text is not shown.
        Raises ReplayMismatch when the text that is due by now is shorter than the logged one or
        does not divide where the log ends.
        """
        if len(token_ids) != logged.num_tokens:
            raise ReplayMismatch(
                f"the log ends at token {logged.num_tokens} and holds {len(token_ids)} tokens"
            )
        shown = token_ids[:-1] if ends_by_token else token_ids
        text, stop, num_used = self._feed(shown)
        if stop is not None and num_used < len(token_ids):
            raise ReplayMismatch("the logged text continues after a stop string")
        due = text.encode()
        if len(due) < logged.num_bytes:
            raise ReplayMismatch(
                f"{len(token_ids)} logged tokens give {len(due)} bytes of text, "
                f"the log has {logged.num_bytes}"
            )
        try:
            self._owed = due[logged.num_bytes :].decode()
        except UnicodeDecodeError:
            raise ReplayMismatch("the logged text ends within a character") from None
        if stop is None:
            return OutputChunk((), "")
        return OutputChunk((), self._take_owed(), None, FinishReason.STOP, stop)

    def push(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
    ) -> OutputChunk:
        """Returns the piece of a step's tokens. The one with a finish reason is the last."""
        if finish_reason is None and self._matcher is None and not self._owed:
            self.num_tokens += len(token_ids)
            return OutputChunk(token_ids, self._detokenizer.push(token_ids), logprobs)
        ends_by_token = finish_reason is FinishReason.STOP
        shown = token_ids[:-1] if ends_by_token else token_ids
        text, stop, num_used = self._feed(shown)
        text = self._take_owed() + text
        if stop is not None:
            return OutputChunk(
                token_ids[:num_used],
                text,
                logprobs[:num_used] if logprobs is not None else None,
                FinishReason.STOP,
                stop,
            )
        if finish_reason is None:
            return OutputChunk(token_ids, text, logprobs)
        if ends_by_token:
            self.num_tokens += 1
        tail, stop = self._flush()
        if stop is not None:
            return OutputChunk(token_ids, text + tail, logprobs, FinishReason.STOP, stop)
        return OutputChunk(token_ids, text + tail, logprobs, finish_reason, stop_reason)

    def abort(self) -> str:
        """Returns the text that is still held back, for a job that ends without a finish."""
        return self._take_owed() + self._flush()[0]

    def _feed(self, token_ids: Sequence[int]) -> tuple[str, str | None, int]:
        """Returns (text, stop string, tokens used), up to the token that completes a stop."""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids), None, len(token_ids)
        parts = []
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self.num_tokens < self._min_tokens:
                parts.append(text)
                continue
            released, stop = self._matcher.push(text)
            parts.append(released)
            if stop is not None:
                return "".join(parts), stop, index + 1
        return "".join(parts), None, len(token_ids)

    def _flush(self) -> tuple[str, str | None]:
        tail = self._detokenizer.flush()
        if self._matcher is None or self.num_tokens < self._min_tokens:
            return tail, None
        released, stop = self._matcher.push(tail)
        return (released, stop) if stop is not None else (released + self._matcher.flush(), None)

    def _take_owed(self) -> str:
        owed, self._owed = self._owed, ""
        return owed

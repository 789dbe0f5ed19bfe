"""BatchedDeltas: joins the tokens of several steps for a stream with an interval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from api.jobs.sent_events import MANY_CHARS, delta_of
from shared.choice_deltas import ChoiceDelta, segment_deltas
from shared.messages import Delta


class BatchedDeltas:
    """Joins a choice's tokens to one delta per `interval` of them, or per MANY_CHARS of their text:
    its first text at once, and the rest with its end. As vLLM's `--stream-interval`.

    The joined deltas have one segment each and no place in the log: for formatters alone.
    """

    def __init__(self, interval: int) -> None:
        """Takes the interval in tokens, at least 1."""
        self._interval = interval
        self._held: dict[int, list[ChoiceDelta]] = {}  # by choice
        self._num_held: dict[int, tuple[int, int]] = {}  # tokens, and characters of their text
        self._begun: set[int] = set()

    def push(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yields the deltas that these complete. Raises ValueError as `segment_deltas`."""
        for delta in deltas:
            for part in segment_deltas(delta):
                yield from self._take(part)

    def rest(self) -> Iterator[Delta]:
        """Yields everything that is held, at the end of the stream."""
        for choice in sorted(self._held):
            yield self._joined(choice)

    def _take(self, part: ChoiceDelta) -> Iterator[Delta]:
        choice = part.choice
        self._held.setdefault(choice, []).append(part)
        num_tokens, num_chars = self._num_held.get(choice, (0, 0))
        num_tokens, num_chars = num_tokens + len(part.token_ids), num_chars + len(part.text)
        self._num_held[choice] = (num_tokens, num_chars)
        is_full = num_tokens >= self._interval or num_chars >= MANY_CHARS
        if is_full or choice not in self._begun or part.finish_reason is not None:
            if part.text:
                self._begun.add(choice)
            yield self._joined(choice)

    def _joined(self, choice: int) -> Delta:
        parts = self._held.pop(choice)
        del self._num_held[choice]
        token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
        text = "".join(part.text for part in parts)
        logprobs = tuple(one for part in parts for one in part.logprobs or ())
        has_logprobs = any(part.logprobs is not None for part in parts)
        return delta_of(
            parts[-1]._replace(
                token_ids=token_ids, text=text, logprobs=logprobs if has_logprobs else None
            )
        )

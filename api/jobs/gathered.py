"""GatheredDeltas: a stream told in fewer, larger events, as its request asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shared.messages import START, ChoiceDelta, Cursor, Delta, Segment, segment_deltas


class GatheredDeltas:
    """Gives a choice's tokens on as one delta for each `interval` of them: its first text at
    once, and what is left with its end. As vLLM's `--stream-interval`.

    The deltas that it gives have one segment each and no place in the log: for dialects alone.
    """

    def __init__(self, interval: int) -> None:
        """`interval`: tokens, at least 1."""
        self._interval = interval
        self._held: dict[int, list[ChoiceDelta]] = {}  # by choice
        self._num_held: dict[int, int] = {}
        self._begun: set[int] = set()

    def push(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yields what these complete. Raises ValueError as `segment_deltas`."""
        for delta in deltas:
            for part in segment_deltas(delta):
                yield from self._take(part)

    def rest(self) -> Iterator[Delta]:
        """Yields everything that is held; the stream is over."""
        for choice in sorted(self._held):
            yield self._given(choice)

    def _take(self, part: ChoiceDelta) -> Iterator[Delta]:
        choice = part.choice
        self._held.setdefault(choice, []).append(part)
        held = self._num_held[choice] = self._num_held.get(choice, 0) + len(part.token_ids)
        is_first = choice not in self._begun
        if is_first or held >= self._interval or part.finish_reason is not None:
            if part.text:
                self._begun.add(choice)
            yield self._given(choice)

    def _given(self, choice: int) -> Delta:
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


def delta_of(part: ChoiceDelta) -> Delta:
    """Returns `part` as a delta of one segment without a place in the log: for dialects alone."""
    num_tokens, num_bytes = len(part.token_ids), len(part.text.encode())
    segment = Segment(part.choice, num_tokens, num_bytes, part.finish_reason, part.stop_reason)
    end = Cursor(num_tokens, num_bytes)
    return Delta(START, end, part.token_ids, part.text, part.logprobs, (segment,))

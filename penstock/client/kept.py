"""The delivered part of an answer: a connection that repeats it from its start is compared with
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from penstock.client.answer import Choice, Delta
from penstock.client.errors import StreamLost

Whole = TypeVar("Whole", str, list[Any])


class Kept(Generic[Whole]):
    """A text, or a list, that grows. Pieces that are there already are compared and left out."""

    def __init__(self, empty: Whole) -> None:
        self.whole: Whole = empty
        self._place = 0  # of the connection's text

    def repeat(self) -> None:
        """Expects everything once more."""
        self._place = 0

    def rest(self, piece: Whole) -> Whole:
        """Returns the new part of the next piece. Raises StreamLost if it differs."""
        begin, self._place = self._place, self._place + len(piece)
        had = self.whole[begin : self._place]
        if piece[: len(had)] != had:
            raise StreamLost("The resumed stream does not match the text already received.")
        new = piece[len(had) :]
        self.whole += new
        return new


class KeptCall:
    """A tool call: its first part with id and name, then parts of its arguments."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = first
        self._arguments = Kept("")

    def repeat(self) -> None:
        self._arguments.repeat()

    def rest(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the new part of a part; None: nothing. Raises StreamLost."""
        function = part.get("function") or {}
        arguments = self._arguments.rest(function.get("arguments") or "")
        if part is self._first:
            return dict(part)
        if not arguments:
            return None
        return {"index": part["index"], "function": {"arguments": arguments}}

    @property
    def whole(self) -> dict[str, Any]:
        """The call as in a whole message."""
        function = {**(self._first.get("function") or {}), "arguments": self._arguments.whole}
        return {"id": self._first.get("id"), "type": "function", "function": function}


class KeptChoice:
    """One choice of an answer."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = Kept("")
        self._reasoning = Kept("")
        self._token_ids: Kept[list[Any]] = Kept([])
        self._logprobs: dict[str, Kept[list[Any]]] = {}
        self._calls: dict[int, KeptCall] = {}
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def repeat(self) -> None:
        """Expects the choice from its start."""
        self._text.repeat()
        self._reasoning.repeat()
        for entries in (self._token_ids, *self._logprobs.values()):
            entries.repeat()
        for call in self._calls.values():
            call.repeat()

    def take(
        self,
        event: Mapping[str, Any],
        *,
        text: str = "",
        reasoning: str = "",
        tool_calls: Sequence[Mapping[str, Any]] = (),
        token_ids: Sequence[int] = (),
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> Delta:
        """Returns the delta of an event. Raises StreamLost."""
        is_end = finish_reason is not None and self._finish_reason is None
        if is_end:
            self._finish_reason, self._stop_reason = finish_reason, stop_reason
        parts = [self._call(part) for part in tool_calls]
        return Delta(
            text=self._text.rest(text),
            index=self._index,
            reasoning=self._reasoning.rest(reasoning),
            tool_calls=tuple(part for part in parts if part is not None),
            token_ids=tuple(self._token_ids.rest(list(token_ids))),
            logprobs=self._rest_of_logprobs(logprobs),
            finish_reason=finish_reason if is_end else None,
            event=event,
        )

    @property
    def whole(self) -> Choice:
        """The delivered part."""
        return Choice(
            self._text.whole,
            self._reasoning.whole,
            tuple(call.whole for _, call in sorted(self._calls.items())),
            tuple(self._token_ids.whole),
            {name: kept.whole for name, kept in self._logprobs.items()} or None,
            self._finish_reason,
            self._stop_reason,
        )

    def _call(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._calls.setdefault(part["index"], KeptCall(part)).rest(part)

    def _rest_of_logprobs(self, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Returns the new entries of each of the lists that log probabilities are."""
        lists = {name: value for name, value in (given or {}).items() if isinstance(value, list)}
        if not lists:
            return None
        return {
            name: self._logprobs.setdefault(name, Kept([])).rest(value)
            for name, value in lists.items()
        }


def is_empty(delta: Delta) -> bool:
    """Returns whether an event added nothing."""
    added = (delta.text, delta.reasoning, delta.tool_calls, delta.token_ids, delta.finish_reason)
    return not any(added)

"""Stop strings: the first one in text that arrives in parts, with as little held as can be."""

from __future__ import annotations

from collections import deque


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
        """The held text: nothing follows that could complete a stop string."""
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

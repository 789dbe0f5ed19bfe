"""HeldPrefixes: what the engine's prefix cache holds, and what of it is not reported yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

MAX_PREFIXES = 8192  # of 128 tokens and more each; the oldest are not reported


class PrefixNews(NamedTuple):
    """Digests to be noted as held, and as lost; with `is_first` no others are held."""

    held: list[bytes]
    lost: list[bytes]
    is_first: bool


class HeldPrefixes:
    """The newest digests of prefixes in the cache. `changed` is set while some are to be noted."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._held: dict[bytes, None] = {}
        self._noted: set[bytes] = set()
        self._news: dict[bytes, bool] = {}  # where the two differ
        self._is_first = True

    @property
    def num_noted(self) -> int:
        """Number of digests that Redis has if it has all that `take` returned."""
        return len(self._noted)

    def change(self, changes: Iterable[tuple[bytes, bool]]) -> None:
        """Takes digests from the engine, each with whether its cache holds it now."""
        for digest, is_held in changes:
            self._held.pop(digest, None)
            if is_held:
                self._held[digest] = None
            self._compare(digest)
        while len(self._held) > MAX_PREFIXES:
            oldest = next(iter(self._held))
            del self._held[oldest]
            self._compare(oldest)

    def clear(self) -> None:
        """Forgets all: the engine is gone, and its cache with it."""
        self._held.clear()
        self.start_over()

    def start_over(self) -> None:
        """Offers all of them again: Redis may have lost, or missed, any."""
        self._noted.clear()
        self._news = dict.fromkeys(self._held, True)
        self._is_first = True
        self.changed.set()

    def take(self, count: int) -> PrefixNews:
        """Returns the next `count` digests to be noted."""
        news = PrefixNews([], [], self._is_first)
        for digest, is_held in list(islice(self._news.items(), count)):
            del self._news[digest]
            (news.held if is_held else news.lost).append(digest)
        self._noted.update(news.held)
        self._noted.difference_update(news.lost)
        self._is_first = False
        if not self._news:
            self.changed.clear()
        return news

    def _compare(self, digest: bytes) -> None:
        is_held = digest in self._held
        if is_held == (digest in self._noted):
            self._news.pop(digest, None)
        else:
            self._news[digest] = is_held
            self.changed.set()

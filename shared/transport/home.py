"""Home: the server that takes the writes of our partition, found again after every failover.

All keys of a partition live in one cluster slot, so in a cluster as behind sentinels there is
always exactly one server to talk to. Who that is, is asked anew for every connection that is
opened: the answer is never older than the question, and it is only believed once that server
confirms it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.transport.server_url import Address

log = logging.getLogger(__name__)

SEARCH_TIMEOUT_S = 3.0
MAX_LEARNED = 64

_BROKEN = (RedisError, OSError, EOFError)


class HomeUnknown(RedisConnectionError):
    """Nobody takes our writes at the moment. The sentence holds neither address nor password."""


class WrongTopology(RedisError):
    """What answered is not what the URL says it is: waiting does not help."""


@dataclass(frozen=True, slots=True)
class Found:
    """The home that a finder confirmed, and further servers that could be asked next time."""

    address: Address
    others: Sequence[Address] = ()


class Finder(Protocol):
    """Asks one server who the home is."""

    async def find(self, seed: Address) -> Found:
        """Raises HomeUnknown, WrongTopology, or whatever kept the servers from answering."""
        ...


class Home:
    """Safe for any number of tasks: those that ask at the same time share one search."""

    def __init__(self, seeds: Sequence[Address], finder: Finder) -> None:
        self._given = tuple(seeds)
        self._seeds = list(seeds)  # the one that knew it last is at the front
        self._finder = finder
        self._searching = asyncio.Lock()
        self._num_begun = 0
        self._num_answered = 0  # the number of the search that gave the outcome
        self._outcome: Found | RedisError = HomeUnknown("nobody was asked yet")
        self.latest: Address | None = None  # where it was found last

    async def locate(self) -> Address:
        """The home's address, as of now. Raises HomeUnknown or WrongTopology."""
        begun_before = self._num_begun
        async with self._searching:
            if self._num_answered <= begun_before:  # only what began after we asked is good enough
                self._num_begun += 1
                self._outcome = await self._search()
                self._num_answered = self._num_begun
            outcome = self._outcome
        if isinstance(outcome, Found):
            return outcome.address
        raise type(outcome)(*outcome.args)

    async def _search(self) -> Found | RedisError:
        trouble: RedisError = HomeUnknown("no server answered in time")
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                for seed in tuple(self._seeds):
                    self._seeds.remove(seed)  # first, so that a silent one is not asked first again
                    self._seeds.append(seed)
                    try:
                        found = await self._finder.find(seed)
                    except (HomeUnknown, WrongTopology) as error:
                        trouble = error
                    except _BROKEN as error:
                        if not isinstance(trouble, WrongTopology):
                            trouble = HomeUnknown(f"no server answered ({type(error).__name__})")
                    else:
                        self._remember(seed, found)
                        return found
        except TimeoutError:
            pass
        return trouble

    def _remember(self, seed: Address, found: Found) -> None:
        order = [seed, *self._given, found.address, *found.others]
        self._seeds = list(dict.fromkeys(order))[: len(self._given) + MAX_LEARNED]
        if self.latest not in (None, found.address):
            host, port = found.address
            log.warning("redis has another home", extra={"home": f"{host}:{port}"})
        self.latest = found.address

"""A hostile tenant in a long round: it fills one pot after the other, as its key allows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import httpx
from websockets.exceptions import WebSocketException

from tests.hostile.fillers import FILLERS, OF_ALL_FRONTENDS, Filler
from tests.support.job_history import HistoryWriter

AT_A_TIME = 2
HELD_S = (1.0, 6.0)
# A worst client's pots, small enough to be filled within seconds; what one tenant leaves of open
# requests is enough for all readers of a round.
SMALL_POTS = {
    "MAX_OPEN_REQUESTS": 500,
    "MAX_BODY_BYTES": 2**20,
    "MAX_OPEN_BODY_BYTES": 4 * 2**20,
    "MAX_OPEN_ANSWER_BYTES": 2**20,
    "MAX_ANSWER_BYTES": 2**20,
    "MAX_WAITING_TEXT_BYTES": 2**19,
}


class HostileTenant:
    """Fills pots of any frontend; `refusals` counts how it was refused, by pot."""

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        key: str,
        model: str,
        history: HistoryWriter,
        rng: random.Random,
    ) -> None:
        self.filled: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._urls = urls
        self._key = key
        self._model = model
        self._history = history
        self._rng = rng

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(self._fill_pots())

    async def _fill_pots(self) -> None:
        pots = FILLERS | {fill.__name__: fill for fill in OF_ALL_FRONTENDS}
        while True:
            pot = self._rng.choice(list(pots))
            url = self._rng.choice(self._urls())
            filler = Filler(url, self._key, self._model, self._history)
            try:
                async with filler, asyncio.timeout(10 * HELD_S[1]):
                    await pots[pot](filler)
                    await asyncio.sleep(self._rng.uniform(*HELD_S))
            except (httpx.HTTPError, OSError, WebSocketException, TimeoutError):
                await asyncio.sleep(0.5)  # of a frontend that is broken
            self.filled[pot] += 1
            for refusal, count in filler.refusals.items():
                self.refusals[f"{pot}: {refusal}"] += count

"""Several servers that are told the same and must answer the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared.transport.ports.jobs import KeyTaken, QueueFull, TransportError
from tests.contract.shared.transport.stages import Stage

LIFE_TOLERANCE_MS = 120_000  # between the times to live of one key: the servers' paces differ
SHOWN_BEFORE, SHOWN = 100, 400  # characters of answers that differ


class Mirrors:
    """The stages, the first of which the others are compared with."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages

    async def everywhere(self, action: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """What `action(stage, *arguments)` returned on every stage; raises QueueFull and KeyTaken
        where all did.

        Another TransportError is an answer like any other: its sentence.
        """

        async def outcome(stage: Stage) -> tuple[Any, Any]:
            try:
                return await action(stage, *arguments), None
            except QueueFull as error:
                return error.scope, error
            except (TransportError, KeyTaken) as error:
                return str(error), error

        first, *others = await asyncio.gather(*map(outcome, self.stages))
        for stage, other in zip(self.stages[1:], others, strict=True):
            assert other[0] == first[0], _difference(self.stages[0], first[0], stage, other[0])
            assert type(other[1]) is type(first[1]), f"{stage.name}: {other[1]!r}"
        if isinstance(first[1], QueueFull | KeyTaken):
            raise first[1]
        return first[0]

    async def compare_everything(self) -> None:
        """All that is stored and all that was published; each stage's bounds are kept."""
        await self.everywhere(lambda stage: stage.everything())
        await self.everywhere(lambda stage: stage.heard())
        lives = [await stage.lives_ms() for stage in self.stages]
        for stage, life_ms in zip(self.stages, lives, strict=True):
            assert life_ms.keys() == lives[0].keys(), stage.name
            for key, ms in life_ms.items():
                assert abs(ms - lives[0][key]) < LIFE_TOLERANCE_MS, f"{stage.name}: life of {key}"
            await stage.assert_bounded()


def _difference(first: Stage, answer: object, second: Stage, other: object) -> str:
    """Both answers, from a little before where they begin to differ."""
    one, two = repr(answer), repr(other)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    begin = max(0, sum(1 for _ in same) - SHOWN_BEFORE)
    shown = slice(begin, begin + SHOWN)
    return f"{first.name}: ...{one[shown]}\n{second.name}: ...{two[shown]}"

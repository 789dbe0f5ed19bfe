"""Several servers that are told the same and must answer the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared.transport.ports.admission import KeyTaken, QueueFull
from shared.transport.ports.jobs import TransportError
from tests.contract.shared.transport.targets import Target

LIFE_TOLERANCE_MS = 120_000  # between the times to live of one key: the servers' paces differ
SHOWN_BEFORE, SHOWN = 100, 400  # characters of answers that differ


class Mirrors:
    """The targets, the first of which the others are compared with."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets

    async def everywhere(self, action: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """What `action(target, *arguments)` returned on every target; raises QueueFull and KeyTaken
        where all did.

        Another TransportError is an answer like any other: its sentence.
        """

        async def outcome(target: Target) -> tuple[Any, Any]:
            try:
                return await action(target, *arguments), None
            except QueueFull as error:
                return error.scope, error
            except (TransportError, KeyTaken) as error:
                return str(error), error

        first, *others = await asyncio.gather(*map(outcome, self.targets))
        for target, other in zip(self.targets[1:], others, strict=True):
            assert other[0] == first[0], _difference(self.targets[0], first[0], target, other[0])
            assert type(other[1]) is type(first[1]), f"{target.name}: {other[1]!r}"
        if isinstance(first[1], QueueFull | KeyTaken):
            raise first[1]
        return first[0]

    async def compare_everything(self) -> None:
        """All that is stored and all that was published; each target's bounds are kept."""
        await self.everywhere(lambda target: target.everything())
        await self.everywhere(lambda target: target.heard())
        lives = [await target.lives_ms() for target in self.targets]
        for target, life_ms in zip(self.targets, lives, strict=True):
            assert life_ms.keys() == lives[0].keys(), target.name
            for key, ms in life_ms.items():
                assert abs(ms - lives[0][key]) < LIFE_TOLERANCE_MS, f"{target.name}: life of {key}"
            await target.assert_bounded()


def _difference(first: Target, answer: object, second: Target, other: object) -> str:
    """Both answers, from a little before where they begin to differ."""
    one, two = repr(answer), repr(other)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    begin = max(0, sum(1 for _ in same) - SHOWN_BEFORE)
    shown = slice(begin, begin + SHOWN)
    return f"{first.name}: ...{one[shown]}\n{second.name}: ...{two[shown]}"

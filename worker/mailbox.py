"""Mailbox: messages to the one task that owns the running jobs."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from shared.transport.ports.queue import Delivery
from worker.engine_process.messages import RequestRejected, StepOutputs
from worker.publisher import Settled
from worker.running_jobs import RunningJob

FULL = 64


@dataclass(frozen=True, slots=True)
class Admit:
    """Claimed jobs; `done` is set when they are in the table."""

    deliveries: tuple[Delivery, ...]
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Drop:
    """A job that ended elsewhere or is another worker's. `attempt` None: whichever runs."""

    job_id: str
    attempt: int | None
    why: str


@dataclass(frozen=True, slots=True)
class StopTokens:
    """The publisher ends this job as failed."""

    job_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Halt:
    """No more tokens of any job, please; `done` is set when the engine was told."""

    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Surrender:
    """Take jobs out of the table and hand them over: all, or those of an engine that died."""

    all_jobs: bool
    reply: asyncio.Future[list[RunningJob]]


Message = Admit | Drop | StopTokens | Halt | Surrender | Settled | StepOutputs | RequestRejected


class Mailbox:
    """First in, first out. Only the engine can flood it, so only the engine's reader waits."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._filled = asyncio.Event()
        self._low = asyncio.Event()
        self._low.set()

    def post(self, message: Message) -> None:
        """Never waits; these are at most a few per job."""
        self._messages.append(message)
        self._filled.set()
        if len(self._messages) >= FULL:
            self._low.clear()

    async def post_when_low(self, message: Message) -> None:
        """Waits while FULL messages are there."""
        await self._low.wait()
        self.post(message)

    async def get(self) -> Message:
        """The oldest message, waiting for one."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        message = self._messages.popleft()
        if len(self._messages) < FULL:
            self._low.set()
        return message

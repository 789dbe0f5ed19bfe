"""Mailbox: messages to the task that owns the running jobs, and their handling."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from shared.transport.ports.queue import Delivery
from worker.engine_process.messages import RequestRejected, StepOutputs
from worker.job_runner import JobRunner
from worker.outbox import Settled
from worker.running_jobs import RunningJob

FULL = 64


@dataclass(frozen=True, slots=True)
class Add:
    """Adds claimed jobs to the table; then sets `done`."""

    deliveries: tuple[Delivery, ...]
    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drops a job that ended elsewhere or is another worker's; `attempt` None: any attempt."""

    job_id: str
    attempt: int | None
    why: str


@dataclass(frozen=True, slots=True)
class StopTokens:
    """Cancels a job in the engine, because the publisher ends it as failed."""

    job_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """Cancels all jobs in the engine; sets `done` when the cancels are sent."""

    done: asyncio.Event


@dataclass(frozen=True, slots=True)
class TakeAll:
    """Removes jobs from the table and returns them: all, or those of an engine that died."""

    all_jobs: bool
    reply: asyncio.Future[list[RunningJob]]


Message = Add | Cancel | StopTokens | StopAll | TakeAll | Settled | StepOutputs | RequestRejected


class Mailbox:
    """A first-in, first-out queue. Only the engine can flood it, so only its reader waits."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._filled = asyncio.Event()
        self._low = asyncio.Event()
        self._low.set()

    def post(self, message: Message) -> None:
        """Adds a message without waiting; for those that are at most a few per job."""
        self._messages.append(message)
        self._filled.set()
        if len(self._messages) >= FULL:
            self._low.clear()

    async def post_when_low(self, message: Message) -> None:
        """Adds a message, waiting while there are FULL."""
        await self._low.wait()
        self.post(message)

    async def get(self) -> Message:
        """Returns the oldest message; waits for one."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        message = self._messages.popleft()
        if len(self._messages) < FULL:
            self._low.set()
        return message


def handle(runner: JobRunner, message: Message) -> None:
    """Applies one message to the running jobs."""
    match message:
        case StepOutputs():
            runner.take(message)
        case Settled():
            runner.settle(message)
        case Add(deliveries, done):
            for delivery in deliveries:
                runner.admit(delivery)
            done.set()
        case Cancel(job_id, attempt, why):
            runner.cancel(job_id, attempt, why)
        case StopTokens(job_id, attempt):
            runner.stop_engine_work(job_id, attempt)
        case RequestRejected():
            runner.refuse(message)
        case StopAll(done):
            runner.stop_all()
            done.set()
        case TakeAll(all_jobs, reply):
            reply.set_result(runner.take_all() if all_jobs else runner.take_from_engine())

"""One scenario's view of the deployment: clients to start, a store to look at, an oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shared.transport.connect import RedisTransport
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.expected import EchoText, random_prompt
from tests.chaos.harness.oracle import StoreOracle, check_finished, check_reading
from tests.chaos.harness.reading import Reading
from tests.support.jobs import accepted, make_job
from tests.support.polling import PATIENCE_S, until
from tests.support.service_processes import WorkerProcess


class Scenario:
    """Made for each test by the `scenario` fixture."""

    def __init__(self, deployment: Deployment, transport: RedisTransport, echo: EchoText) -> None:
        self.deployment = deployment
        self.transport = transport
        self.echo = echo
        self.rng = random.Random(5)
        self.oracle = StoreOracle(transport, deployment.model)
        self.is_settled = False
        self._clients: list[Client] = []

    @property
    def redis(self) -> Any:
        return self.transport.connections.commands

    def client(
        self, max_tokens: int = 60, *, prompt: list[int] | None = None, **more: Any
    ) -> Client:
        """Started. `resumes=True`: one that goes on at another frontend."""
        prompt = random_prompt(self.rng) if prompt is None else prompt
        client = Client(self.deployment.urls, prompt, max_tokens, **more).start()
        self._clients.append(client)
        return client

    def clients(self, count: int, max_tokens: int = 60, **more: Any) -> list[Client]:
        return [self.client(max_tokens, first_url=i, **more) for i in range(count)]

    @asynccontextmanager
    async def middle_of(
        self, clients: Sequence[Client], after_tokens: int = 10, **throttle: float
    ) -> AsyncIterator[None]:
        """Inside the block all of them have read so many tokens, and none comes to its end."""
        self.deployment.throttle.apply(after_tokens, **throttle)
        try:
            for client in clients:
                await client.tokens(after_tokens)
            yield
        finally:
            self.deployment.throttle.release()

    async def submit(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> str:
        """A job straight into the queue, without a reader. Its id."""
        members = {"seed": 1, "temperature": 0.0, "timeout_ms": 60_000, **more}
        job = make_job(prompt=prompt, model=self.deployment.model, max_tokens=max_tokens, **members)
        return await accepted(self.transport.store, job)

    def reader_of(
        self, job_id: str, prompt: list[int], max_tokens: int, *, first_url: int = 0
    ) -> Client:
        """A started reader of a job that is there already."""
        client = Client(self.deployment.urls, prompt, max_tokens, first_url=first_url, resumes=True)
        client.reading.job_id = job_id
        self._clients.append(client)
        return client.start()

    async def job(self, job_id: str) -> dict[str, str]:
        """The job's hash."""
        fields = await self.redis.hgetall(self.transport.keys.job(job_id))
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def live_ids(self) -> list[str]:
        """The ids of all jobs that have not ended."""
        live = await self.redis.zrange(self.transport.keys.live, 0, -1)
        return [job_id.decode() for job_id in live]

    async def num_live(self, number: int) -> list[str]:
        """Returns the ids of all jobs that have not ended, once there are so many."""

        async def ids() -> list[str]:
            found = await self.live_ids()
            return found if len(found) == number else []

        return [*await until(ids, f"{number} jobs")]

    async def num_queued(self, number: int) -> None:
        """Returns when so many jobs wait."""

        async def is_so() -> bool:
            return (await self.transport.registry.queue_stats()).queued == number

        await until(is_so, f"{number} jobs to wait")

    async def all_are(self, job_ids: Sequence[str], **fields: str) -> None:
        """Returns when the hashes of these jobs have these fields."""

        async def are_so() -> bool:
            jobs = [await self.job(job_id) for job_id in job_ids]
            return all(job.items() >= fields.items() for job in jobs)

        await until(are_so, f"{len(job_ids)} jobs to have {fields}")

    async def worker_of(self, job_id: str) -> WorkerProcess:
        owner = (await self.job(job_id))["owner"]
        return next(w for w in self.deployment.workers if w.alive and w.worker_id == owner)

    async def all_finished(self, clients: Sequence[Client], timeout_s: float = PATIENCE_S) -> None:
        """Every one of them has read the whole, as in an undisturbed run."""
        for reading in await self._readings(clients, timeout_s):
            check_finished(reading, self.echo)

    async def all_ended(
        self, clients: Sequence[Client], timeout_s: float = PATIENCE_S
    ) -> list[Reading]:
        """Every one of them has read the whole, or a beginning of it and an error."""
        readings = await self._readings(clients, timeout_s)
        for reading in readings:
            check_reading(reading, self.echo)
        return readings

    async def settled(self) -> None:
        """The oracle's last word; every scenario ends with it."""
        await self.oracle.settled(self.deployment.worker_ids())
        self.is_settled = True

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def _readings(self, clients: Sequence[Client], timeout_s: float) -> list[Reading]:
        return list(await asyncio.gather(*(client.ended(timeout_s) for client in clients)))

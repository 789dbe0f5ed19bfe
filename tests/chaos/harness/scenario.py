"""One scenario's view of the deployment: clients to start, a store to look at, an oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shared.keys import new_job_id
from shared.messages import Job, OnDisconnect, SamplingParams
from shared.transport.connect import RedisTransport
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.jobs import Submitted
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.expected import EchoText, random_prompt
from tests.chaos.harness.oracle import StoreOracle, check_finished, check_reading
from tests.chaos.harness.reading import Reading
from tests.support.polling import PATIENCE_S
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

    async def submit(
        self, prompt: Sequence[int], max_tokens: int, *, timeout_ms: int = 60_000, **more: Any
    ) -> str:
        """A job straight into the queue, without a reader. Its id."""
        job = Job(
            job_id=new_job_id(),
            model=self.deployment.model,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0),
            kind="generate",
            timeout_ms=timeout_ms,
            **{"on_disconnect": OnDisconnect.CONTINUE, **more},
        )
        accepted = await self.transport.store.submit(job, AdmissionLimits(), "")
        assert accepted.outcome is Submitted.ACCEPTED
        return job.job_id

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

"""A worker without a process: takes jobs, says what the test says, and dies at any point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.keys import GROUP
from shared.messages import Cursor, Delta
from shared.text.tokenizer import FastTokenizer
from shared.transport.connect import RedisTransport
from shared.transport.ports.queue import Append, AppendResult, Delivery, WorkerReport
from shared.transport.wire import chain_hash

LEASE_MS = 120_000  # it sends no heartbeat: longer than any scenario


class Phantom:
    """Speaks the worker's port; `begin` first. It sends a heartbeat only on request."""

    def __init__(
        self, transport: RedisTransport, model: str, checkpoint: Path, name: str = "phantom"
    ) -> None:
        self.worker_id = name
        self._transport = transport
        self._queue = transport.queue
        self._model = model
        self._tokenizer = FastTokenizer.from_bytes((checkpoint / "tokenizer.json").read_bytes())

    async def begin(self) -> Phantom:
        await self._queue.setup([self._model])
        await self.heartbeat()
        return self

    async def heartbeat(self, lease_ms: int = LEASE_MS) -> None:
        await self._queue.heartbeat(
            WorkerReport(self.worker_id, lease_ms, (self._model,), {"step": 0}, ())
        )

    async def pull(self, count: int, block_ms: int = 2000) -> Sequence[Delivery]:
        return await self._queue.pull(self.worker_id, count, block_ms)

    async def deliver_only(self) -> int:
        """Takes entries and dies before it has claimed them. Returns how many."""
        redis: Any = self._transport.connections.commands
        queue = self._transport.keys.queue(self._model, 0)
        reply = await redis.xreadgroup(GROUP, self.worker_id, {queue: ">"}, count=100)
        return len(reply[0][1]) if reply else 0

    async def say(self, delivery: Delivery, num_tokens: int) -> AppendResult:
        """The echo's next tokens, from where the delivery stands; the job does not end."""
        prompt, done = delivery.job.prompt_token_ids, delivery.output_token_ids
        every = tuple(prompt[i % len(prompt)] for i in range(len(done) + num_tokens))
        text = self._tokenizer.decode(every).encode()[delivery.end.num_bytes :].decode()
        to = Cursor(len(every), delivery.end.num_bytes + len(text.encode()))
        fresh = every[len(done) :]
        start_hash = chain_hash("", done)
        item = Append(
            delivery.job.job_id,
            delivery.attempt,
            Delta(delivery.end, to, fresh, text),
            start_hash,
            chain_hash(start_hash, fresh),
        )
        (result,) = await self._queue.append(self.worker_id, LEASE_MS, [item])
        return result

    async def die(self) -> None:
        """Its lease ends; what it holds stays its own."""
        await self._transport.queue.declare_dead(self.worker_id)

"""Opens a transport: all ports over one Redis URL. Used by the `main` modules alone."""

from __future__ import annotations

import time
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.keys import NAMESPACE, Keys
from shared.redis.check import UnsafeServer, check_server, is_forbidden
from shared.redis.connections import Connections
from shared.redis.pubsub import Subscriber
from shared.redis.topology import WrongTopology
from shared.redis.url import redacted
from shared.transport.batch_store import RedisBatchStore
from shared.transport.dead_letters import RedisDeadLetters
from shared.transport.deployment import RedisDeployment
from shared.transport.drain_rate import DrainRates
from shared.transport.durability import RedisDurability
from shared.transport.event_bus import RedisEventBus
from shared.transport.failures import is_out_of_memory, translated
from shared.transport.file_index import RedisFileIndex
from shared.transport.job_queue import RedisJobQueue
from shared.transport.job_search import RedisJobSearch
from shared.transport.job_store import RedisJobStore
from shared.transport.job_store import StorePolicy as StorePolicy
from shared.transport.kept_prompts import RedisKeptPrompts
from shared.transport.model_offers import RedisModelOffers
from shared.transport.pulls import AFFINITY_MS
from shared.transport.scripts import Scripts
from shared.transport.wire import SCHEMA_VERSION
from shared.transport.worker_registry import RedisWorkerRegistry


class RedisTransport:
    """All ports over one server, over the primary that sentinels name, or over the cluster node
    that has its slot; `aclose` closes them all.

    Nothing connects before it is used, so it can be created while Redis is unavailable.
    """

    def __init__(
        self, redis_url: str, keys: Keys, policy: StorePolicy, affinity_ms: int = AFFINITY_MS
    ) -> None:
        self.url = redacted(redis_url)  # for logs
        self.keys = keys
        self.connections = Connections(redis_url, keys.live)
        self.is_fake = self.connections.is_fake
        is_sharded = self.connections.is_sharded
        scripts = Scripts(keys, policy.record_ms, is_sharded=is_sharded)
        subscriber = Subscriber(self.connections.new_pubsub, is_sharded=is_sharded)
        drains = DrainRates()
        self.durability = RedisDurability(self.connections, scripts)
        self.store = RedisJobStore(keys, self.connections, scripts, policy, drains)
        self.registry = RedisWorkerRegistry(keys, self.connections, scripts, drains)
        self._new_queue = partial(
            RedisJobQueue, keys, self.connections, scripts, subscriber, affinity_ms=affinity_ms
        )
        self.queue = self.new_queue()
        self.offers = RedisModelOffers(self.connections, scripts)
        self.bus = RedisEventBus(keys, subscriber)
        self.dead_letters = RedisDeadLetters(keys, self.connections.commands, scripts)
        self.search = RedisJobSearch(keys, self.connections, scripts)
        self.prompts = RedisKeptPrompts(keys, self.connections.commands)
        self.files = RedisFileIndex(keys, self.connections.commands, scripts)
        self.deployment = RedisDeployment(keys, self.connections, scripts)
        self.batches = RedisBatchStore(keys, self.connections.commands, scripts)

    def new_queue(self) -> RedisJobQueue:
        """Returns a queue of no model yet: a worker that loads another model starts with one."""
        return self._new_queue()

    async def check(self) -> list[str]:
        """Returns warnings, as sentences. Raises UnsafeServer for a server that would lose jobs,
        and TransportError for one that does not answer."""
        if self.is_fake:
            return ["fake:// is an in-process server: nothing survives, no other process can join."]
        primary = self.connections.primary
        with translated("check"):
            if primary is not None:
                try:
                    await primary.locate()
                except WrongTopology as error:
                    raise UnsafeServer(str(error)) from error
            warnings = await check_server(self.connections.commands, self.connections.kind)
            async with self.connections.reaching(self.keys.meta) as redis:
                return [*warnings, *await check_schema(redis, self.keys)]

    async def aclose(self) -> None:
        await self.bus.aclose()
        await self.connections.aclose()


async def open_transport(
    redis_url: str,
    *,
    namespace: str = NAMESPACE,
    policy: StorePolicy | None = None,
    affinity_ms: int = AFFINITY_MS,
) -> RedisTransport:
    """Returns a transport that is not connected yet. Raises UnsupportedUrl with a sentence.

    `affinity_ms`: see RedisJobQueue.
    """
    keys = Keys(namespace)
    return RedisTransport(redis_url, keys, policy or StorePolicy(), affinity_ms)


async def check_schema(redis: Redis, keys: Keys) -> list[str]:
    """Notes the schema of the data under the namespace; returns warnings, as sentences.

    Raises UnsafeServer if a newer release wrote it, or where the access list forbids the writes.
    """
    try:
        await redis.hsetnx(keys.meta, "schema", str(SCHEMA_VERSION))
        await redis.hsetnx(keys.meta, "created", str(int(time.time())))
        found = await redis.hget(keys.meta, "schema")
    except ResponseError as error:
        if is_out_of_memory(error):
            return ["Redis is out of memory (maxmemory): no job is accepted at the moment."]
        if is_forbidden(error):
            raise UnsafeServer(
                f"The server refuses a command that Penstock needs: {error}"
            ) from error
        raise
    text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
    if not text.isdigit() or int(text) > SCHEMA_VERSION:
        raise UnsafeServer(
            f"The data under '{keys.namespace}:' has schema {text[:20]}, this release knows up to "
            f"{SCHEMA_VERSION}; run a newer release or another namespace."
        )
    return []

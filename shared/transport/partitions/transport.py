"""PartitionedTransport: all ports over the partitions of a deployment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from shared.keys import NAMESPACE, Keys
from shared.partitions import PartitionCount
from shared.transport.connect import RedisTransport, StorePolicy, open_transport
from shared.transport.partitions.lists import (
    PartitionedDeadLetters,
    PartitionedJobSearch,
    PartitionedKeptPrompts,
)
from shared.transport.partitions.partitions import Partitions
from shared.transport.partitions.queue import PartitionedJobQueue
from shared.transport.partitions.registry import (
    PartitionedDeployment,
    PartitionedModelOffers,
    PartitionedWorkerRegistry,
)
from shared.transport.partitions.store import (
    PartitionedBatchStore,
    PartitionedDurability,
    PartitionedEventBus,
    PartitionedJobStore,
)
from shared.transport.pulls import AFFINITY_MS


class PartitionedTransport:
    """As RedisTransport, over several of them: each is a whole copy of the wire, with connections
    of its own, which lead to the server that has its slot."""

    def __init__(self, transports: Sequence[RedisTransport], num_new: int) -> None:
        """The first `num_new` partitions get the new jobs."""
        self.partitions = partitions = Partitions(transports, num_new)
        self.url = partitions.home.url
        self.is_fake = partitions.home.is_fake
        self.store = PartitionedJobStore(partitions)
        self._queues = deque([PartitionedJobQueue(partitions)], maxlen=2)  # a former one may wait
        self.offers = PartitionedModelOffers(partitions)
        self.bus = PartitionedEventBus(partitions)
        self.durability = PartitionedDurability(partitions)
        self.registry = PartitionedWorkerRegistry(partitions)
        self.search = PartitionedJobSearch(partitions)
        self.dead_letters = PartitionedDeadLetters(partitions)
        self.prompts = PartitionedKeptPrompts(partitions)
        self.deployment = PartitionedDeployment(partitions)
        self.files = partitions.home.files
        self.batches = PartitionedBatchStore(partitions)

    @property
    def queue(self) -> PartitionedJobQueue:
        return self._queues[-1]

    def new_queue(self) -> PartitionedJobQueue:
        """Replaces the queue by one of no model yet: its worker is done with the former one."""
        for one in self.partitions.all:
            one.transport.queue = one.transport.new_queue()
        self._queues.append(PartitionedJobQueue(self.partitions))
        return self.queue

    async def check(self) -> list[str]:
        """Checks the server of every partition, as RedisTransport.check."""
        num = len(self.partitions.all)
        found = await asyncio.gather(*(one.transport.check(num) for one in self.partitions.all))
        return list(dict.fromkeys(line for lines in found for line in lines))

    async def aclose(self) -> None:
        for queue in self._queues:
            await queue.aclose()
        await self.partitions.aclose()


async def open_partitions(
    redis_url: str,
    count: PartitionCount,
    *,
    namespace: str = NAMESPACE,
    policy: StorePolicy | None = None,
    affinity_ms: int = AFFINITY_MS,
) -> RedisTransport | PartitionedTransport:
    """Returns a transport over these partitions, not connected yet; of one a RedisTransport."""
    policy = policy or StorePolicy()
    if count.total == 1:
        return await open_transport(
            redis_url, namespace=namespace, policy=policy, affinity_ms=affinity_ms
        )
    transports = [
        RedisTransport(redis_url, Keys(namespace, number), policy, affinity_ms, 1 / count.num_new)
        for number in range(count.total)
    ]
    return PartitionedTransport(transports, count.num_new)

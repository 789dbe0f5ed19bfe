"""Obituary: whoever saw a worker die says so, and its jobs move at once.

Without it they wait for the end of its lease, which is all that others can go by. The launcher is
the parent of its workers: it knows.
"""

from __future__ import annotations

import asyncio

from shared.host_name import host_name
from shared.transport.base import TransportError
from shared.transport.connect import open_transport

PATIENCE_S = 2.0  # the lease ends anyway


class Obituary:
    """Of the workers of one Redis and namespace."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self._redis_url = redis_url
        self._namespace = namespace

    async def worker_died(self, pid: int) -> None:
        """Ends the lease of this machine's worker that had this process id. A store that is away is
        not told: never raises, and takes PATIENCE_S at most."""
        transport = await open_transport(self._redis_url, namespace=self._namespace)
        try:
            async with asyncio.timeout(PATIENCE_S):
                for worker in await transport.store.workers():
                    is_here = worker.worker_id.rpartition("-")[0] == host_name()
                    if is_here and worker.stats.get("pid") == pid:
                        await transport.queue.declare_dead(worker.worker_id)
        except (TransportError, TimeoutError):
            pass
        finally:
            await transport.aclose()

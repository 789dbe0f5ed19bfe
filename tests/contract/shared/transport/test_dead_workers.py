"""Whoever was buried leaves nothing behind, also when it stirs once more."""

from __future__ import annotations

from shared.keys import GROUP
from tests.support.jobs import MODEL
from tests.support.transport_steps import Steps


async def test_reconciling_without_a_lease_brings_no_buried_consumer_back(
    steps: Steps,
) -> None:
    await steps.running("w1")
    await steps.die("w1")
    await steps.worker("w2")
    (taken,) = await steps.queue.recover("w2", 8)
    assert await steps.redis.hkeys(steps.keys.workers) == [b"w2"]
    assert await steps.queue.reconcile("w1", frozenset()) == []
    consumers = await steps.redis.xinfo_consumers(steps.keys.queue(MODEL, 0), GROUP)
    assert [consumer["name"] for consumer in consumers] == [b"w2"]
    await steps.heartbeat("w1")
    assert await steps.queue.reconcile("w1", frozenset()) == []
    assert await steps.queue.release("w2", taken.job.job_id, taken.attempt)

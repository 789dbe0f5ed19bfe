"""Models that workers can load: what waits for each, and which worker loads it."""

from __future__ import annotations

import asyncio

from shared.transport.ports.offers import WaitingModel
from shared.transport.ports.registry import Offer
from tests.support.jobs import MODEL
from tests.support.polling import until
from tests.support.transport_steps import Steps

OTHER = "other/model:1"
LIFE_MS = 5000


async def offer(
    steps: Steps, worker: str = "w1", claimed: str = "", bound_ms: int = 30_000
) -> dict[str, WaitingModel]:
    rows = await steps.transport.offers.offer(
        worker,
        (MODEL, OTHER),
        life_ms=LIFE_MS,
        bound_ms=bound_ms,
        swap_ms=2000,
        claimed=claimed,
    )
    return {row.model: row for row in rows}


async def claim(steps: Steps, worker: str, *, unserved: bool = True, life_ms: int = 5000) -> bool:
    return await steps.transport.offers.claim(worker, OTHER, life_ms, unserved=unserved)


async def test_an_offer_returns_what_waits_for_each_model(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.worker("w2")
    assert await offer(steps) == {
        MODEL: WaitingModel(MODEL, 0, 0, num_workers=1),
        OTHER: WaitingModel(OTHER, 0, 0),
    }
    await steps.submit(model=OTHER)
    await asyncio.sleep(0.05)
    await steps.submit(model=OTHER)
    waiting = (await offer(steps))[OTHER]
    assert waiting.num_waiting == 2
    assert 50 <= waiting.oldest_ms < 10_000


async def test_the_jobs_of_a_dead_worker_wait_for_an_unserved_model(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.queue.setup([OTHER])
    await steps.heartbeat("w2", models=(OTHER,))
    await steps.submit(model=OTHER)
    assert len(await steps.pull("w2")) == 1
    assert (await offer(steps))[OTHER].num_waiting == 0
    await steps.die("w2")
    found = (await offer(steps))[OTHER]
    assert (found.num_waiting, found.num_workers) == (1, 0)


async def test_the_jobs_of_a_paused_queue_are_no_reason_to_load_its_model(steps: Steps) -> None:
    await steps.queue.announce(OTHER, b"{}", {})
    await steps.submit(model=OTHER)
    assert await steps.registry.pause(OTHER, "operator")
    assert (await offer(steps))[OTHER].num_waiting == 0
    await steps.registry.resume(OTHER)
    assert (await offer(steps))[OTHER].num_waiting == 1


async def test_one_of_many_workers_gets_a_model(steps: Steps) -> None:
    workers = [f"w{n}" for n in range(8)]
    claims = await asyncio.gather(*(claim(steps, worker) for worker in workers))
    assert claims.count(True) == 1
    winner = workers[claims.index(True)]
    assert await claim(steps, winner), "a repeat after a lost reply"
    for worker in workers:
        assert (await offer(steps, worker))[OTHER].is_claimed == (worker != winner)


async def test_a_claim_ends_unless_its_worker_renews_it(steps: Steps) -> None:
    assert await claim(steps, "w1", life_ms=200)
    await offer(steps, claimed=OTHER)  # for LIFE_MS
    await asyncio.sleep(0.3)
    assert not await claim(steps, "w2")
    assert await claim(steps, "w1", life_ms=50)
    await offer(steps, "w2", claimed=OTHER)  # another's claim is not renewed
    await until(lambda: claim(steps, "w2"))


async def test_a_model_that_is_served_by_now_is_not_loaded_for_its_wait(steps: Steps) -> None:
    await steps.worker("w2", models=(OTHER,))
    assert not await claim(steps, "w1")
    assert await claim(steps, "w1", unserved=False), "to help with it"


async def test_a_draining_worker_serves_no_model(steps: Steps) -> None:
    await steps.worker("w2", models=(OTHER,), draining=True)
    assert (await offer(steps))[OTHER].num_workers == 0
    assert await claim(steps, "w1")


async def test_offered_models_are_listed_with_the_shortest_wait(steps: Steps) -> None:
    await steps.queue.announce(OTHER, b"{}", {})
    assert (await steps.registry.models())[OTHER].offer is None
    await offer(steps, "w1")
    await offer(steps, "w2", bound_ms=0)
    found = (await steps.registry.models())[OTHER]
    assert found.offer == Offer(wait_s=2.0)
    assert found.unserved_s > 0
    await claim(steps, "w1")
    await offer(steps, "w1", claimed=OTHER)
    assert (await steps.registry.models())[OTHER].offer == Offer(2.0, is_loading=True)


async def test_an_offer_ends_with_its_worker(steps: Steps) -> None:
    await steps.queue.announce(OTHER, b"{}", {})
    await steps.transport.offers.offer("w1", (OTHER,), life_ms=50, bound_ms=0, swap_ms=0)
    await asyncio.sleep(0.1)
    assert (await steps.registry.models())[OTHER].offer is None
    await offer(steps, "w2")
    assert await steps.redis.hkeys(steps.keys.offers) == [b"w2"], "old ones are dropped"

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
    steps: Steps,
    worker: str = "w1",
    claimed: str = "",
    bound_ms: int = 30_000,
    failed: tuple[str, ...] = (),
) -> dict[str, WaitingModel]:
    rows = await steps.transport.offers.offer(
        worker,
        (MODEL, OTHER),
        life_ms=LIFE_MS,
        bound_ms=bound_ms,
        swap_ms=2000,
        claimed=claimed,
        failed=failed,
    )
    return {row.model: row for row in rows}


async def claim(
    steps: Steps,
    worker: str,
    *,
    unserved: bool = True,
    life_ms: int = 5000,
    drains: bool = False,
) -> bool:
    return await steps.transport.offers.claim(
        worker, OTHER, life_ms, unserved=unserved, drains=drains
    )


async def test_an_offer_returns_what_waits_for_each_model(steps: Steps) -> None:
    await steps.worker("w1")
    await steps.worker("w2")
    assert await offer(steps) == {
        MODEL: WaitingModel(MODEL, 0, 0, num_workers=2),
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

    async def waits() -> bool:
        found = (await offer(steps))[OTHER]
        return (found.num_waiting, found.num_workers) == (1, 0)

    await until(waits)


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
        seen = await offer(steps, worker, claimed=OTHER if worker == winner else "")
        assert seen[OTHER].is_claimed == (worker != winner)


async def test_a_claim_ends_unless_its_worker_renews_it(steps: Steps) -> None:
    assert await claim(steps, "w1", life_ms=200)
    await offer(steps, claimed=OTHER)  # for LIFE_MS
    await asyncio.sleep(0.3)
    assert not await claim(steps, "w2")
    assert await claim(steps, "w1", life_ms=50)
    await offer(steps, "w2", claimed=OTHER)  # another's claim is not renewed
    await until(lambda: claim(steps, "w2"))


async def test_a_claim_ends_with_the_next_offer_of_its_worker_without_it(steps: Steps) -> None:
    assert await claim(steps, "w1")
    await offer(steps, "w2")
    assert not await claim(steps, "w2")
    await offer(steps, "w1")
    assert await claim(steps, "w2")


async def test_an_idle_worker_takes_the_claim_of_one_that_drains(steps: Steps) -> None:
    assert await claim(steps, "w1", drains=True)
    assert not await claim(steps, "w2", drains=True), "one busy worker is enough"
    seen = (await offer(steps, "w2"))[OTHER]
    assert (seen.is_claimed, seen.is_drained_for) == (False, True)
    assert await claim(steps, "w2")
    assert (await offer(steps, "w1", claimed=OTHER))[OTHER].is_claimed
    assert not await claim(steps, "w1"), "its jobs have ended too late"
    assert (await offer(steps, "w2", claimed=OTHER))[OTHER].is_claimed is False


async def test_a_worker_whose_jobs_have_ended_keeps_its_claim(steps: Steps) -> None:
    assert await claim(steps, "w1", drains=True)
    assert await claim(steps, "w1")
    assert not await claim(steps, "w2")


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

    async def is_alone() -> bool:
        await offer(steps, "w2")
        return await steps.redis.hkeys(steps.keys.offers) == [b"w2"]

    await until(is_alone, "old ones are dropped")


async def test_a_model_that_a_worker_failed_to_load_is_shown_until_it_is_loaded(
    steps: Steps,
) -> None:
    await steps.queue.announce(OTHER, b"{}", {})
    await offer(steps, failed=(OTHER,))
    assert (await steps.registry.models())[OTHER].load_failed
    await offer(steps)
    assert not (await steps.registry.models())[OTHER].load_failed


async def num_commands(steps: Steps) -> int:
    found = await steps.redis.info("commandstats")
    return sum(command["calls"] for command in found.values())


async def test_the_cost_of_an_offer_does_not_grow_with_the_workers(steps: Steps) -> None:
    """But for one in COUNTED_MS, which reads each worker a fixed number of times."""
    usual: dict[int, int] = {}
    counting: dict[int, int] = {}
    num_started = 0
    for num_workers in (50, 500):
        while num_started < num_workers:
            num_started += 1
            await steps.heartbeat(f"w{num_started}", models=(MODEL,))
            await offer(steps, f"w{num_started}")
        await steps.submit(model=OTHER)
        costs = []
        for _ in range(3):
            await asyncio.sleep(0.5)
            for _ in range(4):
                before = await num_commands(steps)
                await offer(steps)
                costs.append(await num_commands(steps) - before)
        usual[num_workers], counting[num_workers] = min(costs), max(costs)
    assert usual[500] == usual[50]
    assert counting[50] < counting[500] < 2 * 500 + counting[50]

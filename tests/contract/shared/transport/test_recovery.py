"""release, recover, retire: what becomes of a worker's jobs without it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.messages import Cursor, Failed, JobState, TokenLogprob
from shared.transport.connect import RedisTransport
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.queue import AppendStatus, CrashCause, Delivery, WorkerReport
from tests.support.jobs import MODEL, Stream
from tests.support.polling import until
from tests.support.transport_steps import FINISHED, Steps, calls_of, other_process, whole_log


async def test_a_dead_workers_job_goes_on_where_its_log_ends(steps: Steps) -> None:
    old = Stream(await steps.running("w1"))
    logprobs = (TokenLogprob(5, -0.5), TokenLogprob(6, -0.75))
    await steps.say("w1", old, [5, 6], "aé", logprobs=logprobs, cached_tokens=2)
    await steps.say("w1", old, [7], "c", logprobs=(TokenLogprob(7, -1.0),))
    await steps.die("w1")
    await steps.worker("w2")
    (taken,) = await steps.queue.recover("w2", 8)
    assert taken.output_token_ids == (5, 6, 7)
    assert taken.output_logprobs == (*logprobs, TokenLogprob(7, -1.0))
    assert (taken.end, taken.attempt, taken.crashes) == (Cursor(3, 4), 2, 1)
    assert taken.cached_tokens == 2
    new = Stream(taken)
    assert (await steps.say("w2", new, [8], "d", end=FINISHED)).status is AppendStatus.OK
    assert (await steps.say("w1", old, [9], "x")).status is AppendStatus.FENCED
    text = "".join(event.text for event in (await whole_log(steps, old.job_id))[:-1])
    assert text == "aécd"
    await steps.assert_counters_true()


async def test_a_lease_that_runs_out_is_a_death(steps: Steps) -> None:
    delivery = await steps.running("w1")
    await steps.worker("w2")
    assert await steps.queue.recover("w2", 8) == []
    await steps.heartbeat("w1", lease_ms=30)

    async def recovered() -> list[str]:
        return [taken.job.job_id for taken in await steps.queue.recover("w2", 8)]

    assert await until(recovered) == [delivery.job.job_id]


async def test_a_zombies_words_are_fenced(steps: Steps) -> None:
    old = Stream(await steps.running("w1"))
    await steps.die("w1")
    await steps.worker("w2")
    (taken,) = await steps.queue.recover("w2", 8)
    await steps.heartbeat("w1")  # it wakes
    assert (await steps.say("w1", old, [5], "x", end=FINISHED)).status is AppendStatus.FENCED
    assert not await steps.queue.release("w1", old.job_id, 1)
    new = Stream(taken)
    assert (await steps.say("w2", new, [5], "y", end=FINISHED)).status is AppendStatus.OK
    # Also when it has ended: whose the attempt was is what its worker has to know.
    assert (await steps.say("w1", old, [6], "x", end=FINISHED)).status is AppendStatus.FENCED


async def test_a_claim_reports_what_the_lost_attempt_logged_and_when(
    steps: Steps,
) -> None:
    old = Stream(await steps.running("w1"))
    await steps.say("w1", old, [5], "a")
    await steps.say("w1", old, [6, 7], "bc")
    await steps.die("w1")
    await steps.worker("w2")
    (second,) = await steps.queue.recover("w2", 8)
    lost = second.lost_claim
    assert lost is not None
    assert (lost.worker_id, lost.num_resumed, second.end.num_tokens) == ("w1", 0, 3)
    assert lost.first_delta_age_s is not None
    assert lost.last_delta_age_s is not None
    assert lost.age_s >= lost.first_delta_age_s >= lost.last_delta_age_s >= 0

    # Of an attempt that logged nothing there is nothing, although the one before it did.
    await steps.die("w2")
    await steps.worker("w3")
    (third,) = await steps.queue.recover("w3", 8)
    lost = third.lost_claim
    assert lost is not None
    assert (lost.worker_id, lost.num_resumed) == ("w2", 3)
    assert (lost.first_delta_age_s, lost.last_delta_age_s) == (None, None)

    # What the third one logs is its own, and none of the first one's.
    await steps.say("w3", Stream(third), [8], "d")
    assert await steps.queue.release("w3", old.job_id, 3)
    (fourth,) = await steps.queue.recover("w3", 8)
    assert fourth.lost_claim is None
    fields = await steps.redis.hgetall(steps.keys.job(old.job_id))
    assert not fields.keys() & {b"out_ms", b"last_ms"}


async def test_a_heartbeat_distinguishes_taken_jobs_from_ended_ones(
    steps: Steps,
) -> None:
    taken, ended = await steps.running("w1"), await steps.running("w1")
    assert (await steps.say("w1", Stream(ended), [5], "x", end=FINISHED)).status is AppendStatus.OK
    await steps.die("w1")
    await steps.worker("w2")
    (again,) = await steps.queue.recover("w2", 8)
    assert again.job == taken.job
    jobs = [(delivery.job.job_id, 1) for delivery in (taken, ended)]
    report = WorkerReport("w1", 20_000, (MODEL,), {"step": 1}, jobs)
    for _ in range(2):  # while it runs there, and when it has ended there
        reply = await steps.queue.heartbeat(report)
        assert set(reply.dropped) == {job_id for job_id, _ in jobs}
        assert (reply.taken, reply.lost) == ([taken.job.job_id], [])
        await steps.say("w2", Stream(again), [5], "x", end=FINISHED)


async def test_recover_takes_no_more_than_its_limit_and_then_the_rest(
    steps: Steps,
) -> None:
    """More than one page of pending entries: nothing may be buried with the worker."""
    await steps.worker("w1")
    jobs = {(await steps.submit()).job_id for _ in range(150)}
    assert len(await steps.pull("w1", 200)) == 150
    await steps.die("w1")
    await steps.worker("w2")
    first = await steps.queue.recover("w2", 40)
    assert len(first) == 40
    rest = await steps.queue.recover("w2", 200)
    assert {taken.job.job_id for taken in (*first, *rest)} == jobs
    assert await steps.redis.hkeys(steps.keys.workers) == [b"w2"]
    await steps.assert_counters_true()


async def test_a_buried_worker_leaves_no_consumer(steps: Steps) -> None:
    await steps.running("w1")
    await steps.die("w1")
    await steps.worker("w2")
    await steps.queue.recover("w2", 8)
    await steps.queue.recover("w2", 8)
    consumers = await steps.redis.xinfo_consumers(steps.keys.queue(MODEL, 0), "w")
    assert [consumer["name"] for consumer in consumers] == [b"w2"]
    assert await steps.redis.hkeys(steps.keys.workers) == [b"w2"]


async def test_a_worker_of_two_models_is_buried_when_both_are_empty(
    steps: Steps,
) -> None:
    await steps.worker("w1", models=("a", "b"))
    await steps.submit(model="a")
    of_b = await steps.submit(model="b")
    assert len(await steps.pull("w1")) == 2
    await steps.die("w1")
    only_a, only_b = other_process(steps.transport), other_process(steps.transport)
    await only_a.worker("wa", models=("a",))
    assert len(await only_a.queue.recover("wa", 8)) == 1
    assert b"w1" in await steps.redis.hkeys(steps.keys.workers)
    await only_b.worker("wb", models=("b",))
    (taken,) = await only_b.queue.recover("wb", 8)
    assert taken.job == of_b
    assert b"w1" not in await steps.redis.hkeys(steps.keys.workers)


async def test_a_recover_without_a_lease_takes_nothing(steps: Steps) -> None:
    await steps.running("w1")
    await steps.die("w1")
    assert await steps.queue.recover("w1", 8) == []


async def test_a_lost_recover_reply_is_healed_by_reconcile(steps: Steps) -> None:
    delivery = await steps.running("w1")
    await steps.die("w1")
    await steps.worker("w2")
    await steps.queue.recover("w2", 8)  # and the reply is lost
    (again,) = await steps.queue.reconcile("w2", frozenset())
    assert (again.job, again.attempt, again.crashes) == (delivery.job, 3, 1)


async def test_a_reconcile_does_not_take_a_job_back_that_went_to_another_worker_meanwhile(
    transport: RedisTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read its pending list, and stands still until another worker runs the job."""
    steps, others = Steps(transport), other_process(transport)
    job_id = (await steps.running("w1")).job.job_id
    await others.worker("w2")
    read_pending = steps.queue._pending
    running: list[Stream] = []

    async def read_and_stand_still(*arguments: Any) -> Any:
        rows = await read_pending(*arguments)
        if not running:
            await steps.die("w1")
            (taken,) = await others.queue.recover("w2", 8)
            running.append(Stream(taken))
            await steps.heartbeat("w1")
        return rows

    monkeypatch.setattr(steps.queue, "_pending", read_and_stand_still)
    assert await steps.queue.reconcile("w1", frozenset()) == []
    assert (await steps.hash(job_id))["owner"] == "w2"
    (stream,) = running
    assert (await others.say("w2", stream, [5], "a")).status == "ok"
    await steps.die("w1")  # the job is not among those that it leaves
    assert await others.queue.recover("w2", 8) == []
    assert (await others.say("w2", stream, [6], "b", end=FINISHED)).status == "ok"


async def test_a_recover_looks_at_a_bounded_number_of_jobs_of_later_lanes_and_misses_none(
    steps: Steps,
) -> None:
    """Batch rows that were given back lie before a job that the tenant's flood has put last."""
    await steps.worker("w1")
    limits = AdmissionLimits(max_queue_share_per_tenant=1.0)
    rows = [await steps.submit(lane=7, limits=limits) for _ in range(700)]
    *flood, urgent = [await steps.submit(lane=2, limits=limits) for _ in range(128)]
    assert (await steps.hash(urgent.job_id))["q"][-1] == "7"
    for job in flood:
        await steps.store.cancel(job.job_id, "cancelled")
    for first in range(0, 701, 64):
        for delivery in await steps.pull("w1", min(64, 701 - first)):
            await steps.queue.release("w1", delivery.job.job_id, delivery.attempt)
    before = (await calls_of(steps))["xrange"]
    assert await steps.queue.recover("w1", 8, before=3) == []
    assert (await calls_of(steps))["xrange"] - before == 2 * 256
    (taken,) = await steps.queue.recover("w1", 8, before=3)
    assert taken.job.job_id == urgent.job_id
    assert await steps.queue.recover("w1", 8, before=3) == []
    at_last = [one.job.job_id for one in await steps.queue.recover("w1", 1000)]
    assert at_last == [job.job_id for job in rows]


async def test_a_released_job_is_queued_again_without_blame(steps: Steps) -> None:
    stream = Stream(await steps.running("w1"))
    await steps.say("w1", stream, [5], "a")
    assert await steps.queue.release("w1", stream.job_id, 1)
    assert not await steps.queue.release("w1", stream.job_id, 1)
    record = await steps.record(stream.job_id)
    assert (record.state, record.owner, record.queue_position) == (JobState.QUEUED, None, 0)
    await steps.assert_counters_true()
    assert await steps.pull("w1") == []
    (taken,) = await steps.queue.recover("w1", 8)
    assert (taken.attempt, taken.crashes, taken.output_token_ids) == (2, 0, (5,))
    await steps.assert_counters_true()


async def test_a_released_job_can_be_cancelled(steps: Steps) -> None:
    delivery = await steps.running("w1")
    await steps.queue.release("w1", delivery.job.job_id, 1)
    assert await steps.store.cancel(delivery.job.job_id, "cancelled") is not None
    assert await steps.queue.recover("w1", 8) == []
    await steps.assert_counters_true()


async def test_a_retiring_worker_gives_everything_back_without_blame(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    jobs = {(await steps.submit()).job_id for _ in range(70)}
    await steps.pull("w1", 100)
    await steps.queue.retire("w1")
    await steps.queue.retire("w1")
    await steps.assert_counters_true()
    assert await steps.redis.hkeys(steps.keys.workers) == []
    await steps.worker("w2")
    taken = await steps.queue.recover("w2", 100)
    assert {delivery.job.job_id for delivery in taken} == jobs
    assert {delivery.crashes for delivery in taken} == {0}


async def test_a_poison_job_is_dead_lettered_and_its_neighbours_finish(
    steps: Steps,
) -> None:
    await steps.worker("w0")
    poison = (await steps.submit()).job_id
    innocents = {(await steps.submit()).job_id for _ in range(7)}
    held: list[Delivery] = list(await steps.pull("w0"))
    assert len(held) == 8
    finished: set[str] = set()
    for number in range(1, 12):
        dead, alive = f"w{number - 1}", f"w{number}"
        await steps.die(dead)
        await steps.worker(alive)
        held = list(await steps.queue.recover(alive, 8))
        while held and poison not in {delivery.job.job_id for delivery in held}:
            for delivery in held:
                result = await steps.say(alive, Stream(delivery), [5], "a", end=FINISHED)
                assert result.status == "ok"
                finished.add(delivery.job.job_id)
            held = list(await steps.queue.recover(alive, 8))
        if held:
            continue  # it kills the worker before anybody gets a token
        if (await steps.hash(poison))["state"] != "running" and finished == innocents:
            break
    assert finished == innocents
    (end,) = await whole_log(steps, poison)
    assert isinstance(end, Failed)
    assert end.code == "poison"
    ((_, letter),) = await steps.redis.xrange(steps.keys.dead_letters)
    assert letter[b"id"].decode() == poison
    await steps.assert_counters_true()


async def test_jobs_of_a_dead_engine_are_queued_again_with_blame(steps: Steps) -> None:
    stream = Stream(await steps.running("w1"))
    await steps.say("w1", stream, [5], "a")
    await steps.queue.crashed("w1", [(stream.job_id, 1)])
    await steps.queue.crashed("w1", [(stream.job_id, 1)])  # its reply was lost
    assert (await steps.hash(stream.job_id))["state"] == "queued"
    await steps.assert_counters_true()
    (taken,) = await steps.queue.recover("w1", 8)
    assert (taken.attempt, taken.crashes, taken.output_token_ids) == (2, 1, (5,))


async def test_a_stale_workers_crash_blames_no_job(steps: Steps) -> None:
    delivery = await steps.running("w1")
    await steps.die("w1")
    await steps.worker("w2")
    await steps.queue.recover("w2", 8)
    await steps.heartbeat("w1")
    await steps.queue.crashed("w1", [(delivery.job.job_id, 1)])
    found = await steps.hash(delivery.job.job_id)
    assert (found["state"], found["owner"], found["crashes"]) == ("running", "w2", "1")


@pytest.mark.parametrize(
    ("before", "after", "most"),  # what it does before and after its neighbours have shown to run
    [
        (CrashCause.ENGINE, CrashCause.ENGINE, 4),
        (CrashCause.DEVICE, CrashCause.PROVEN_DEVICE, 5),
    ],
)
async def test_a_job_that_kills_engines_or_devices_is_a_dead_letter_and_its_neighbours_finish(
    steps: Steps, before: CrashCause, after: CrashCause, most: int
) -> None:
    await steps.worker("w1")
    poison = (await steps.submit()).job_id
    innocents = {(await steps.submit()).job_id for _ in range(7)}
    held = {delivery.job.job_id: delivery for delivery in await steps.pull("w1")}
    finished: set[str] = set()
    num_deaths = 0
    while (await steps.hash(poison))["state"] in ("queued", "running") or finished != innocents:
        if poison in held:  # it kills the engine before anybody gets a token
            num_deaths += 1
            assert num_deaths <= most
            cause = after if finished else before
            await steps.queue.crashed("w1", [(i, d.attempt) for i, d in held.items()], cause)
        else:
            for job_id, delivery in held.items():
                word = await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
                assert word.status == "ok"
                finished.add(job_id)
        held = {d.job.job_id: d for d in await steps.queue.recover("w1", 8)}
    (end,) = await whole_log(steps, poison)
    assert isinstance(end, Failed)
    assert end.code == "poison"
    ((_, letter),) = await steps.redis.xrange(steps.keys.dead_letters)
    assert letter[b"id"].decode() == poison
    assert not await steps.redis.exists(steps.keys.probe("w1"))
    await steps.assert_counters_true()


async def test_a_device_that_fails_blames_none_of_its_jobs(steps: Steps) -> None:
    await steps.worker("w1")
    job_ids = [(await steps.submit()).job_id for _ in range(8)]
    held = await steps.pull("w1")
    for _ in range(5):
        await steps.queue.crashed(
            "w1", [(d.job.job_id, d.attempt) for d in held], CrashCause.DEVICE
        )
        await steps.assert_counters_true()
        held = list(await steps.queue.recover("w1", 8))
    for job_id in job_ids:
        found = await steps.hash(job_id)
        assert (found["crashes"], found.get("deaths")) == ("0", None)
    assert not await steps.redis.exists(steps.keys.dead_letters)
    lost = [(d.job.job_id, d.attempt) for d in held]
    await steps.queue.crashed("w1", lost, CrashCause.DEVICE)
    await steps.worker("healthy")
    for _ in job_ids:
        (suspect,) = await steps.queue.recover("healthy", 8)  # they are tried one at a time
        await steps.say("healthy", Stream(suspect), [5], "a", end=FINISHED)
    for job_id in job_ids:
        assert (await steps.hash(job_id))["state"] == "finished"
    await steps.assert_counters_true()


async def test_what_was_there_when_devices_failed_waits_until_one_is_known_to_work(
    steps: Steps,
) -> None:
    job = (await steps.running("w1")).job
    await steps.queue.crashed("w1", [(job.job_id, 1)], CrashCause.DEVICE)
    (again,) = await steps.queue.recover("w1", 8, suspects=False)  # once is chance
    await steps.queue.crashed("w1", [(job.job_id, 2)], CrashCause.DEVICE)
    assert await steps.queue.recover("w1", 8, suspects=False) == []
    (again,) = await steps.queue.recover("w1", 8)
    assert await steps.redis.get(steps.keys.probe("w1")) == job.job_id.encode()
    await steps.say("w1", Stream(again), [5], "a")
    assert "losses" not in await steps.hash(job.job_id)
    assert not await steps.redis.exists(steps.keys.probe("w1"))


async def test_devices_that_fail_ten_times_under_one_job_end_it(steps: Steps) -> None:
    """Nothing else waited that could have shown whether they work."""
    delivery = await steps.running("w1")
    for number in range(1, 11):
        await steps.queue.crashed("w1", [(delivery.job.job_id, number)], CrashCause.DEVICE)
        await steps.queue.recover("w1", 8)
    found = await steps.hash(delivery.job.job_id)
    assert (found["state"], found["reason"]) == ("failed", "engine_died")
    await steps.assert_counters_true()


@pytest.mark.parametrize("reason", ["engine_died", "worker_lost"])
async def test_a_job_that_kills_one_after_another_ends_in_spite_of_progress(
    steps: Steps, reason: str
) -> None:
    delivery: Delivery = await steps.running("w0")
    job_id = delivery.job.job_id
    owner = "w0"
    for number in range(1, 40):
        await steps.say(owner, Stream(delivery), [number], "a")
        if reason == "engine_died":
            await steps.queue.crashed(owner, [(job_id, delivery.attempt)])
        else:
            await steps.die(owner)
            owner = f"w{number}"
            await steps.worker(owner)
        taken = await steps.queue.recover(owner, 8)
        if not taken:
            break
        (delivery,) = taken
    else:
        pytest.fail("the job was tried without end")
    found = await steps.hash(job_id)
    assert (found["state"], found["reason"], found["deaths"]) == ("failed", reason, "10")


async def test_a_suspect_that_gives_a_token_is_cleared(steps: Steps) -> None:
    await steps.running("w0")
    taken: Delivery | None = None
    for number in (1, 2):
        await steps.die(f"w{number - 1}")
        await steps.worker(f"w{number}")
        (taken,) = await steps.queue.recover(f"w{number}", 8)
    assert taken is not None
    assert taken.crashes == 2
    assert await steps.redis.get(steps.keys.probe("w2")) == taken.job.job_id.encode()
    await steps.say("w2", Stream(taken), [5], "a")
    assert await steps.redis.exists(steps.keys.probe("w2")) == 0
    assert (await steps.hash(taken.job.job_id))["crashes"] == "0"


async def test_a_token_between_two_deaths_makes_no_suspect(steps: Steps) -> None:
    """Else a long job that lives through three unrelated deaths would end as poison."""
    delivery = await steps.running("w0")
    for number in (1, 2, 3, 4):
        await steps.die(f"w{number - 1}")
        await steps.worker(f"w{number}")
        (delivery,) = await steps.queue.recover(f"w{number}", 8)
        assert delivery.crashes == 1
        assert not await steps.redis.exists(steps.keys.probe(f"w{number}"))
        await steps.say(f"w{number}", Stream(delivery), [number], "a")
        assert (await steps.hash(delivery.job.job_id))["crashes"] == "0"


async def test_a_job_whose_log_was_lost_is_failed_not_restarted(steps: Steps) -> None:
    stream = Stream(await steps.running("w1"))
    await steps.say("w1", stream, [5], "a")
    await steps.redis.delete(steps.keys.log(stream.job_id))
    assert await steps.queue.reconcile("w1", frozenset()) == []
    assert (await steps.hash(stream.job_id))["reason"] == "job_lost"


async def test_after_an_outage_an_ended_lease_means_nothing_for_a_while(
    steps: Steps,
) -> None:
    delivery = await steps.running("w1")
    await steps.worker("w2")
    await steps.die("w1")  # its lease ended like everybody's
    await _silent_for(steps, ms=2500)
    assert await steps.queue.recover("w2", 8) == []
    await steps.heartbeat("w2")
    assert await steps.queue.recover("w2", 8) == []
    await steps.redis.hincrby(steps.keys.pulse, "back_ms", -5000)
    (taken,) = await steps.queue.recover("w2", 8)
    assert taken.job == delivery.job


async def test_after_an_outage_released_jobs_are_taken_at_once(steps: Steps) -> None:
    delivery = await steps.running("w1")
    await steps.queue.release("w1", delivery.job.job_id, 1)
    await _silent_for(steps, ms=2500)
    assert len(await steps.queue.recover("w1", 8)) == 1


async def _silent_for(steps: Steps, *, ms: int) -> None:
    """As if nobody had reached the server for so long."""
    await steps.redis.hincrby(steps.keys.pulse, "at_ms", -ms)


async def test_a_job_that_hangs_two_engines_is_a_dead_letter_and_its_neighbours_finish(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    innocents = {(await steps.submit()).job_id for _ in range(7)}
    poison = (await steps.submit()).job_id
    held = {delivery.job.job_id: delivery for delivery in await steps.pull("w1")}
    finished: set[str] = set()
    num_stalls = 0
    while held:
        if poison in held:
            num_stalls += 1
            # Beside the suspect run those that no engine has hung with.
            await steps.submit()
            held |= {d.job.job_id: d for d in await steps.pull("w1")}
            jobs = [(i, d.attempt) for i, d in held.items()]
            await steps.queue.crashed("w1", jobs, CrashCause.STALL)
        else:
            for job_id, delivery in held.items():
                await steps.say("w1", Stream(delivery), [5], "a", end=FINISHED)
                finished.add(job_id)
        held = {d.job.job_id: d for d in await steps.queue.recover("w1", 8)}
    assert num_stalls == 2
    assert finished >= innocents
    assert len(finished) == 7 + 2
    (end,) = await whole_log(steps, poison)
    assert isinstance(end, Failed)
    assert end.code == "poison"
    assert await steps.redis.xlen(steps.keys.dead_letters) == 1
    await steps.assert_counters_true()


async def test_one_engine_that_hung_ends_no_job(steps: Steps) -> None:
    delivery = await steps.running("w1")
    job = (delivery.job.job_id, delivery.attempt)
    await steps.queue.crashed("w1", [job], CrashCause.STALL)
    (again,) = await steps.queue.recover("w1", 8)
    await steps.say("w1", Stream(again), [5], "a", end=FINISHED)
    found = await steps.hash(job[0])
    assert (found["state"], found["stalls"]) == ("finished", "1")

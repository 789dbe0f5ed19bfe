"""What a frontend asks: logs, records, lists, positions, workers, models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from shared.messages import START, Cursor, Delta, JobState
from shared.transport.connect import RedisTransport
from shared.transport.ports.job_search import JobFilter
from shared.transport.ports.jobs import JobLook, TransportError
from tests.support.jobs import MODEL, Stream
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import FINISHED, Steps, whole_log


async def test_a_log_is_read_in_pages_strictly_after_the_cursor(steps: Steps) -> None:
    stream = Stream(await steps.running())
    for number in range(7):
        await steps.say("w1", stream, [number], "é", end=FINISHED if number == 6 else None)
    whole = await whole_log(steps, stream.job_id)
    assert len(whole) == 8
    read, cursor = [], START
    while page := await steps.store.read_log(stream.job_id, cursor, 3):
        read += page
        cursor = page[-1].end
        if len(page) < 3:
            break
    assert read == whole


async def test_unknown_jobs_have_no_log_and_no_record(transport: RedisTransport) -> None:
    for job_id in ("0-nobody", "7-other-partition", "", "x" * 500, "0-a b", "0-*"):
        assert await transport.store.read_log(job_id, START) == []
        assert await transport.store.get(job_id) is None
        assert await transport.store.attach([(job_id, "fe1#1")]) == [None]
        await transport.store.detach(job_id, "fe1#1")


async def test_entries_and_fields_of_a_newer_release_are_ignored(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5], "a")
    log = steps.keys.log(stream.job_id)
    await steps.redis.xadd(log, {"k": "note", "what": "?"}, id="1-2")
    await steps.redis.hset(steps.keys.job(stream.job_id), "colour", "blue")
    assert len(await whole_log(steps, stream.job_id)) == 1
    record = await steps.record(stream.job_id)
    assert record.extra == {"colour": "blue"}


@pytest.mark.parametrize("count", [1, 4, 32, 256])
async def test_pages_of_nothing_but_unknown_entries_are_passed_over(
    steps: Steps, count: int
) -> None:
    stream = Stream(await steps.running())
    log = steps.keys.log(stream.job_id)
    for number in range(1, 41):
        await steps.redis.xadd(log, {"k": "note", "what": "?"}, id=f"0-{number}")
    assert await steps.store.read_log(stream.job_id, START, count) == []
    for number in range(3):
        await steps.say("w1", stream, [number], "a", end=FINISHED if number == 2 else None)
    page = await steps.store.read_log(stream.job_id, START, count)
    assert len(page) == min(count, 4), "fewer only where nothing follows"
    assert isinstance(page[0], Delta)
    assert page[0].token_ids == (0,)
    assert len(await whole_log(steps, stream.job_id)) == 4


async def test_a_malformed_log_is_an_error_in_words(steps: Steps) -> None:
    stream = Stream(await steps.running())
    await steps.redis.xadd(steps.keys.log(stream.job_id), {"t": "five", "d": "a"}, id="1-1")
    with pytest.raises(TransportError, match="malformed"):
        await whole_log(steps, stream.job_id)


async def test_queue_positions_count_what_goes_before(steps: Steps) -> None:
    await steps.worker("w1")
    running = await steps.submit()
    await steps.pull("w1")
    low = [await steps.submit(lane=3) for _ in range(2)]
    high = [await steps.submit(lane=0) for _ in range(2)]

    async def position(job_id: str) -> int | None:
        record = await steps.record(job_id)
        return record.queue_position

    assert [await position(job.job_id) for job in (*high, *low)] == [0, 1, 2, 3]
    assert await position(running.job_id) is None
    await steps.store.cancel(high[0].job_id, "cancelled")
    assert [await position(job.job_id) for job in (high[1], *low)] == [0, 1, 2]


async def test_a_list_gives_the_positions_that_single_looks_give(
    steps: Steps,
) -> None:
    await steps.worker("w1", models=(MODEL, "other"))
    released = (await steps.running()).job.job_id
    for at in range(9):
        await steps.submit(lane=(3, 0, 5)[at % 3], model=(MODEL, "other")[at % 2], tenant=f"t{at}")
    await steps.pull("w1", 2)
    assert await steps.queue.release("w1", released, 1)
    listed = await steps.list_jobs(None, 50)
    alone = [await steps.store.get(record.job_id) for record in listed]
    assert [record.queue_position for record in listed] == [
        None if record is None else record.queue_position for record in alone
    ]
    places = {record.job_id: record.queue_position for record in listed}
    assert places[released] == 0
    assert sum(place is None for place in places.values()) == 2
    (first,) = await steps.list_jobs(JobState.QUEUED, 1)
    assert first.queue_position == places[first.job_id]


async def test_positions_are_counted_up_to_a_bound(steps: Steps) -> None:
    await steps.queue.setup([MODEL])
    queue = steps.keys.queue(MODEL, 7)
    pipe = steps.redis.pipeline(transaction=False)
    for _ in range(1200):
        pipe.xadd(queue, {"v": 1, "id": "0-somebody"})
    await pipe.execute()
    job = await steps.submit(lane=7)
    (listed,) = await steps.list_jobs(JobState.QUEUED, 5)
    assert (listed.job_id, listed.queue_position) == (job.job_id, 1000)


async def test_jobs_are_listed_by_state(steps: Steps) -> None:
    running = (await steps.running()).job.job_id
    queued = [(await steps.submit()).job_id for _ in range(3)]
    cancelled = (await steps.submit()).job_id
    await steps.store.cancel(cancelled, "cancelled")

    async def listed(state: JobState | None, limit: int = 50) -> set[str]:
        return {record.job_id for record in await steps.list_jobs(state, limit)}

    assert await listed(JobState.RUNNING) == {running}
    assert await listed(JobState.QUEUED) == set(queued)
    assert await listed(JobState.CANCELLED) == {cancelled}
    assert await listed(JobState.FAILED) == set()
    assert await listed(None) == {running, cancelled, *queued}
    assert len(await listed(None, 2)) == 2
    assert await listed(None, 0) == set()


async def test_the_index_of_ended_jobs_is_bounded(steps: Steps) -> None:
    index = steps.keys.ended(JobState.CANCELLED)
    far_ms = 4 * 10**12
    await steps.redis.zadd(index, {f"0-old{n}": far_ms + n for n in range(1200)})
    job = await steps.submit()
    await steps.store.cancel(job.job_id, "cancelled")
    assert await steps.redis.zcard(index) == 1000


async def test_workers_are_listed_while_their_lease_runs(steps: Steps) -> None:
    await steps.worker("w1", stats={"step": 7, "tok_s": 1.5, "device": "cpu"}, draining=True)
    await steps.worker("w2", stalled=True)
    await steps.worker("w3")
    await steps.die("w3")
    first, second = await steps.registry.workers()
    assert (first.worker_id, first.draining, first.stalled) == ("w1", True, False)
    assert first.stats == {"step": 7, "tok_s": 1.5, "device": "cpu"}
    assert first.heartbeat_age_s < 60
    assert (second.worker_id, second.draining, second.stalled) == ("w2", False, True)


async def test_a_statistic_may_not_pose_as_the_workers_state(transport: RedisTransport) -> None:
    with pytest.raises(ValueError, match="models"):
        await Steps(transport).heartbeat("w1", stats={"models": "x"})


async def test_models_list_how_long_no_worker_has_served_them(
    steps: Steps,
) -> None:
    await steps.worker("w1", models=("a", "b"))
    for model in ("a", "b", "c"):
        await steps.queue.announce(model, f'{{"name": "{model}"}}'.encode(), {})
    await steps.redis.zincrby(steps.keys.models_seen, -5000, "a")
    await steps.redis.zincrby(steps.keys.models_seen, -7000, "c")
    found = await steps.registry.models()
    assert list(found) == ["a", "b", "c"]
    assert found["b"].card == b'{"name": "b"}'
    assert (found["a"].unserved_s, found["b"].unserved_s) == (0.0, 0.0)
    assert 7.0 <= found["c"].unserved_s < 60.0
    await steps.die("w1")
    found = await steps.registry.models()
    assert 5.0 <= found["a"].unserved_s < 60.0
    assert 0.0 < found["b"].unserved_s < 60.0


@pytest.mark.parametrize("skew_ms", [3_600_000, -3_600_000])
async def test_times_of_models_are_by_the_clock_that_they_are_compared_with(
    steps: Steps, skew_ms: int
) -> None:
    await steps.redis.hset(steps.keys.pulse, "skew_ms", skew_ms)
    await steps.queue.announce("a", b"{}", {})
    await steps.registry.keep_models({"a": []})
    found = await steps.registry.models()
    assert 0.0 <= found["a"].unserved_s < 60.0
    seconds, _ = await steps.redis.time()
    for key, after_s in ((steps.keys.models_seen, 0), (steps.keys.models_kept, 86_400)):
        score = await steps.redis.zscore(key, "a")
        assert score is not None
        assert abs(score / 1000 - int(seconds) - after_s) < 60


async def test_what_waits_is_counted_by_model_with_and_without_a_worker(
    steps: Steps,
) -> None:
    await steps.queue.announce("a", b"{}", {})
    await steps.queue.announce("b", b"{}", {})
    for model in ("a", "a", "b", "never-announced"):
        await steps.submit(model=model)

    async def waiting() -> Mapping[str, int]:
        await steps.registry.workers()
        return (await steps.registry.queue_stats()).queued_by_model

    assert await waiting() == {"a": 2, "b": 1}
    await steps.worker("w1", models=("a",))
    await steps.pull("w1", 1)
    assert await waiting() == {"a": 1, "b": 1}
    await steps.assert_counters_true()


@pytest.mark.promise(
    "Access: without a worker requests wait, for models that were served recently or are kept, "
    "within their deadlines (ten minutes; always while a frontend with `PENSTOCK_KEEP_MODELS` runs "
    "at least once a day)"
)
async def test_kept_models_outlive_the_day_after_their_last_announcement(
    steps: Steps,
) -> None:
    await steps.queue.announce("kept", b"{}", {"abc": b"1"})
    await steps.queue.announce("old", b"{}", {"def": b"2"})
    keys = steps.keys
    for key in (keys.models, keys.models_seen, keys.blob("abc"), keys.blob("def")):
        await steps.redis.pexpire(key, 500_000)
    await steps.redis.zadd(keys.models_seen, {"kept": 1, "old": 1})
    await steps.registry.keep_models({"kept": ["abc"], "never-announced": ["ghi"]})
    for key in (keys.models, keys.models_seen, keys.models_kept, keys.blob("abc")):
        assert await steps.redis.pttl(key) > 80_000_000, key
    assert await steps.redis.pttl(keys.blob("def")) <= 500_000
    await steps.queue.announce("new", b"{}", {})
    assert set(await steps.registry.models()) == {"kept", "new"}
    await assert_every_key_expires(steps.redis, keys.namespace)
    await steps.redis.zadd(keys.models_kept, {"kept": 1})  # a day without a frontend that keeps it
    await steps.queue.announce("new", b"{}", {})
    assert set(await steps.registry.models()) == {"new"}


@pytest.mark.promise(
    "Access: a list of jobs in one state reads only those, however many wait (live states; ended "
    "ones are the last thousand of each)"
)
async def test_a_tenants_running_jobs_are_found_behind_any_number_that_wait(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    old = [(await steps.submit(tenant="a")).job_id for _ in range(3)]
    taken = [delivery.job.job_id for delivery in await steps.pull("w1", 3)]
    assert sorted(taken) == sorted(old)
    for _ in range(30):
        await steps.submit(tenant="b")

    async def listed(state: JobState | None, tenant: str | None, limit: int) -> set[str]:
        found = await steps.search.find(JobFilter(state, tenant), limit, max_searched=searched)
        return {record.job_id for record in found.records}

    searched = 8
    assert await listed(JobState.RUNNING, None, 20) == set(old)
    assert await listed(JobState.RUNNING, "a", 20) == set(old)
    assert await listed(None, "a", 20) == set(old)
    searched = 5000
    assert await listed(JobState.QUEUED, "a", 20) == set()
    assert len(await listed(None, None, 40)) == 33


async def test_jobs_of_an_older_release_are_listed_once_reap_has_met_them(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    running = await steps.submit(tenant="a")
    await steps.pull("w1", 1)
    queued = await steps.submit(tenant="a")
    keys = steps.keys
    # As an older release leaves them: submitted without an index, or claimed without a move.
    for index in (keys.listed("queued"), keys.listed("queued", "a"), keys.queued_for(MODEL)):
        await steps.redis.delete(index)
        await steps.redis.zadd(index, {running.job_id: running.timeout_ms + 10**13})
    for index in (keys.listed("running"), keys.listed("running", "a")):
        await steps.redis.delete(index)
    assert await steps.list_jobs(JobState.RUNNING, 5) == []
    assert await steps.list_jobs(JobState.QUEUED, 5) == [], "what runs does not wait"
    await steps.store.reap()
    assert [job.job_id for job in await steps.list_jobs(JobState.RUNNING, 5)] == [running.job_id]
    assert [job.job_id for job in await steps.list_jobs(JobState.QUEUED, 5, "a")] == [queued.job_id]
    await steps.assert_counters_true()


async def test_blobs_are_sent_once_and_kept_by_announcing(steps: Steps) -> None:
    await steps.worker("w1")
    blobs = {"abc": b"\x00\xff", "def": b"2"}
    await steps.queue.announce("a", b"{}", blobs)
    assert await steps.registry.get_blob("abc") == b"\x00\xff"
    assert await steps.registry.get_blob("nothing") is None
    blob = steps.keys.blob("abc")
    await steps.redis.pexpire(blob, 500_000)
    await steps.redis.set(steps.keys.blob("def"), b"untouched", keepttl=True)
    await steps.queue.announce("a", b"{}", blobs)
    assert await steps.redis.pttl(blob) > 500_000
    assert await steps.registry.get_blob("def") == b"untouched"


async def test_a_card_is_read_only_while_its_blobs_are_stored(steps: Steps) -> None:
    is_read = asyncio.Event()
    missing: list[str] = []

    async def read_always() -> None:
        while not is_read.is_set():
            for name in await steps.registry.models():
                if await steps.registry.get_blob(f"blob-{name}") is None:
                    missing.append(name)

    reader = asyncio.create_task(read_always())
    for index in range(30):
        name = f"model-{index}"
        await steps.queue.announce(name, b"{}", {f"blob-{name}": b"x" * 100_000})
    is_read.set()
    await reader
    assert missing == []
    for name in ("model-3", "model-4"):
        card_ms = await steps.redis.pttl(steps.keys.models)
        assert await steps.redis.pttl(steps.keys.blob(f"blob-{name}")) >= card_ms
    # Its day is over, and no other worker has announced since.
    await steps.redis.zadd(steps.keys.models_seen, {"model-3": 1})
    assert "model-3" not in await steps.registry.models()
    # The store has lost a blob: it is there again before the announcement ends.
    await steps.redis.delete(steps.keys.blob("blob-model-4"))
    await steps.queue.announce("model-4", b"{}", {"blob-model-4": b"x"})
    assert await steps.registry.get_blob("blob-model-4") == b"x"


async def test_cards_that_no_worker_announces_are_forgotten(steps: Steps) -> None:
    await steps.queue.announce("old", b"{}", {})
    await steps.redis.zadd(steps.keys.models_seen, {"old": 1})
    await steps.queue.announce("new", b"{}", {})
    assert await steps.redis.hkeys(steps.keys.models) == [b"new"]


async def test_ping_measures_a_round_trip(transport: RedisTransport) -> None:
    assert 0 < await transport.store.ping() < 60


async def test_a_look_tells_where_each_job_stands_and_changes_nothing(
    steps: Steps,
) -> None:
    stream = Stream(await steps.running())
    await steps.say("w1", stream, [5, 6], "né")
    queued = (await steps.submit()).job_id
    cancelled = (await steps.submit()).job_id
    await steps.store.cancel(cancelled, "cancelled")
    lost = (await steps.submit()).job_id
    await steps.redis.delete(steps.keys.job(lost))
    before = await steps.hash(stream.job_id), await steps.redis.pttl(steps.keys.job(queued)) > 0
    requested = [stream.job_id, queued, cancelled, lost, "not an id", "7-x"] * 60
    assert await steps.store.look([]) == []
    assert (
        await steps.store.look(requested)
        == [
            JobLook(JobState.RUNNING, Cursor(2, 3)),
            JobLook(JobState.QUEUED, START),
            JobLook(JobState.CANCELLED, START),
            None,
            None,
            None,
        ]
        * 60
    )
    after = await steps.hash(stream.job_id), await steps.redis.pttl(steps.keys.job(queued)) > 0
    assert after == before


@pytest.mark.parametrize(("limit", "tenant"), [(3, None), (3, "rare"), (50, "rare"), (1, "none")])
async def test_a_list_finds_what_lies_deep_in_an_index_of_all_tenants(
    steps: Steps, limit: int, tenant: str | None
) -> None:
    """Live jobs before ended ones, and a tenant's own, however many others have ended since."""
    rare = [(await steps.submit(tenant="rare")).job_id for _ in range(4)]
    others = [(await steps.submit(tenant="many")).job_id for _ in range(20)]
    for job_id in (*rare, *others):
        await steps.store.cancel(job_id, "cancelled")
    found = await steps.list_jobs(JobState.CANCELLED, limit, tenant)
    newest = {None: others[::-1], "rare": rare[::-1], "none": []}[tenant]
    assert len(found) == min(limit, len(newest))
    assert {record.job_id for record in found} <= {*rare, *others}
    if tenant is not None:
        assert all(record.tenant == tenant for record in found)
    ended_ms = [record.ended_ms or 0 for record in found]
    assert ended_ms == sorted(ended_ms, reverse=True)


async def test_a_tenant_without_ended_jobs_reads_none_of_the_others(
    steps: Steps,
) -> None:
    for number in range(30):
        job = await steps.submit(tenant=f"other {number}")
        await steps.store.cancel(job.job_id, "cancelled")
    own = await steps.submit(tenant="own")
    await steps.store.cancel(own.job_id, "cancelled")

    async def records_read(tenant: str) -> int:
        before = await steps.redis.info("commandstats")
        await steps.list_jobs(None, 50, tenant)
        after = await steps.redis.info("commandstats")
        return int(after["cmdstat_hgetall"]["calls"] - before["cmdstat_hgetall"]["calls"])

    if not steps.transport.is_fake:
        assert await records_read("none") == 0
        assert await records_read("own") == 1
    await steps.store.forget(own.job_id)
    assert not await steps.redis.exists(steps.keys.ended_of("own")), "it leaves nothing"


async def test_stored_bytes_are_those_of_the_record_and_the_log(steps: Steps) -> None:
    stream = Stream(await steps.running())
    before = await steps.store.stored_bytes(stream.job_id)
    await steps.say("w1", stream, [5], "a" * 100_000)
    await steps.redis.set(steps.keys.request_record(stream.job_id), "r" * 50_000)
    assert 150_000 <= await steps.store.stored_bytes(stream.job_id) - before < 300_000
    assert await steps.store.stored_bytes("nothing") == 0

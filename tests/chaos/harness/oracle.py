"""The oracle: what must hold of every answer, and of the store when nothing runs any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from shared.keys import GROUP, NUM_LANES
from shared.messages import TERMINAL_STATES
from shared.transport.connect import RedisTransport
from tests.chaos.harness.expected import Answers
from tests.chaos.harness.reading import Reading
from tests.support.polling import PATIENCE_S, until
from tests.support.redis_server import assert_every_key_expires

RELEASED = b"_released"
TERMINAL = frozenset(state.value for state in TERMINAL_STATES)


def check_reading(reading: Reading, answers: Answers) -> None:
    """Text exact, or a prefix and an explicit error; one terminal event; cursors go up."""
    expected = answers.of(reading.prompt, reading.max_tokens)
    result = f"{reading.status} {reading.refusal}"
    assert len(reading.ends) == 1, f"{reading.job_id}: {len(reading.ends)} ends, {result}"
    steps = zip(reading.cursors, reading.cursors[1:], strict=False)
    assert all(a.num_tokens < b.num_tokens for a, b in steps), (
        f"{reading.job_id}: {reading.cursors}"
    )
    token_ids = tuple(reading.token_ids)
    if reading.finished:
        assert token_ids == expected.token_ids, f"{reading.job_id}: other tokens"
        assert reading.text == expected.text, f"{reading.job_id}: another text"
    else:
        assert reading.error_code, reading.ends
        assert expected.token_ids[: len(token_ids)] == token_ids, f"{reading.job_id}: no prefix"
        # A job that is cut within a character shows its bytes as replacement characters.
        text = reading.text.rstrip("\ufffd")
        assert expected.text.startswith(text), f"{reading.job_id}: no prefix"


def check_finished(reading: Reading, answers: Answers) -> None:
    """The same, and nothing less than the whole."""
    check_reading(reading, answers)
    assert reading.finished, f"{reading.job_id}: {reading.ends}"


class StoreOracle:
    """Looks at one deployment's store."""

    def __init__(self, transport: RedisTransport, model: str) -> None:
        self._transport = transport
        self._keys = transport.keys
        self._redis: Any = transport.connections.commands
        self._model = model
        self._jobs_before: frozenset[str] = frozenset()
        self._totals_before: Counter[str] = Counter()

    async def begin(self) -> None:
        """Counts are compared from here on."""
        self._jobs_before = frozenset(await self._job_keys())
        self._totals_before = Counter(await self._totals())

    def begin_at_zero(self) -> None:
        """Counts are compared with those of a store that has just been emptied."""
        self._jobs_before, self._totals_before = frozenset(), Counter()

    async def settled(
        self, worker_ids: Collection[str], timeout_s: float = PATIENCE_S, *, all_kept: bool = True
    ) -> int:
        """Waits until all is over, then checks every invariant of a store at rest.

        Returns the jobs that were looked at. Not `all_kept`: the round was so long that early
        jobs have expired, so the totals may count more than there are.
        """
        await until(lambda: self._at_rest(worker_ids), "the store to come to rest", timeout_s)
        await assert_every_key_expires(self._redis, self._keys.namespace)
        await self._check_held()
        return await self._check_jobs(all_kept=all_kept)

    async def _at_rest(self, worker_ids: Collection[str]) -> bool:
        stats = await self._transport.registry.queue_stats()
        assert (stats.queued, stats.running, stats.queued_tokens) == (0, 0, 0), stats
        assert await self._redis.exists(self._keys.live) == 0, "jobs live"
        assert await self._redis.exists(self._keys.queued_deadlines) == 0, "jobs wait to be begun"
        work = await self._redis.hgetall(self._keys.work(self._model))
        assert not any(int(work[lane]) for lane in work if lane != b"output"), work
        for lane in range(NUM_LANES):
            queue = self._keys.queue(self._model, lane)
            assert await self._redis.xlen(queue) == 0, f"entries in {queue}"
            await self._check_consumers(queue, worker_ids)
        assert {name.decode() for name in await self._redis.hkeys(self._keys.workers)} == set(
            worker_ids
        ), "a dead worker is not buried"
        for worker in await self._transport.registry.workers():
            stats_of = worker.stats
            at_rest = ("jobs", "running", "unflushed_tokens")
            assert all(stats_of[name] == 0 for name in at_rest), stats_of
            assert stats_of["free_blocks"] == stats_of["total_blocks"], stats_of
        tenants = [k async for k in self._redis.scan_iter(match=self._keys.tenant("*"), count=1000)]
        assert not tenants, tenants
        probes = [k async for k in self._redis.scan_iter(match=self._keys.probe("*"), count=1000)]
        assert not probes, probes
        return True

    async def _check_consumers(self, queue: str, worker_ids: Collection[str]) -> None:
        if not await self._redis.exists(queue):
            return
        for consumer in await self._redis.xinfo_consumers(queue, GROUP):
            name = consumer["name"]
            assert name == RELEASED or name.decode() in worker_ids, f"dead consumer {name}"
            assert consumer["pending"] == 0, f"{name} has entries"

    async def _check_held(self) -> None:
        """What a tenant holds at rest is what is kept until some time, always more than 0."""
        names = [key async for key in self._redis.scan_iter(match=self._keys.prefix + "kept:*")]
        pipeline = self._redis.pipeline(transaction=True).hgetall(self._keys.held)
        for name in names:
            pipeline.hvals(name)
        held, *kept = await pipeline.execute()
        parts = {
            name.decode().rpartition("kept:")[2]: [*map(int, part)]
            for name, part in zip(names, kept, strict=True)
        }
        assert all(size > 0 for part in parts.values() for size in part), parts
        sums = {tenant: sum(part) for tenant, part in parts.items() if part}
        assert {tenant.decode(): int(size) for tenant, size in held.items()} == sums, (
            f"held {held}, kept {sums}"
        )

    async def _check_jobs(self, *, all_kept: bool) -> int:
        """Each job of this test: one end, a log without holes; the totals count them."""
        states: Counter[str] = Counter()
        for key in frozenset(await self._job_keys()) - self._jobs_before:
            fields = {n.decode(): v.decode() for n, v in (await self._redis.hgetall(key)).items()}
            if not fields and not all_kept:
                continue  # its retention has just ended
            assert "state" in fields, f"{key} has no state: {fields}"
            assert fields["state"] in TERMINAL, f"{key} is {fields['state']}"
            states[fields["state"]] += 1
            job_id = key.removeprefix(self._keys.job(""))
            assert not await self._redis.exists(self._keys.request(job_id)), "a request is left"
            await self._check_log(job_id, fields)
        totals = Counter(await self._totals())
        totals.subtract(self._totals_before)
        is_true = +totals == states if all_kept else +totals >= states
        assert is_true, f"counted {dict(+totals)}, there are {dict(states)}"
        return states.total()

    async def _check_log(self, job_id: str, job: dict[str, str]) -> None:
        rows = await self._redis.xrange(self._keys.log(job_id))
        if not rows:
            return  # its reader saw the end, and the shorter retention is over
        num_tokens = num_bytes = 0
        for entry_id, fields in rows[:-1]:
            if fields.get(b"k") == b"prompt" and not num_tokens:
                continue  # log probabilities of the prompt
            assert b"k" not in fields, f"{job_id}: an end before the end"
            num_tokens += len(fields[b"t"].split())
            num_bytes += len(fields[b"d"])
            assert entry_id.decode() == f"{num_tokens}-{num_bytes}", f"{job_id}: a hole"
        entry_id, end = rows[-1]
        assert end.get(b"k") == b"end", f"{job_id}: no end"
        assert (job["n"], job["b"]) == (str(num_tokens), str(num_bytes)), f"{job_id}: {job}"
        assert (end[b"n"].decode(), end[b"state"].decode()) == (job["n"], job["state"])

    async def _job_keys(self) -> list[str]:
        match = self._keys.job("*")
        return [key.decode() async for key in self._redis.scan_iter(match=match, count=1000)]

    async def _totals(self) -> dict[str, int]:
        stats = await self._transport.registry.queue_stats()
        return dict(stats.totals)

"""A random walk through the transitions, driven through the ports of several servers at once.

Every step happens everywhere and must be answered alike; what a step touched, and from time to time
everything, must read alike. Real time decides nothing: leases, graces and deadlines are far away,
and what they would bring about is brought about by a step of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

from shared.keys import NUM_LANES, is_job_id
from shared.messages import (
    START,
    Cursor,
    Idempotency,
    JobState,
    OnDisconnect,
)
from shared.prefixes import DIGEST_BYTES, digests_of_prompt
from shared.transport.ports.admission import AdmissionLimits, KeyTaken, QueueFull
from shared.transport.ports.queue import Append, AppendStatus, CrashCause, Delivery, WorkerReport
from shared.transport.ports.registry import Order, Ordered
from tests.contract.shared.transport.ledger import Ledger
from tests.contract.shared.transport.mirrors import Mirrors
from tests.contract.shared.transport.random_append import random_append
from tests.contract.shared.transport.targets import FAR_MS, MODELS, SHORT_MS, Target
from tests.contract.shared.transport.weights import WEIGHTS
from tests.support.jobs import Stream, make_job

LIMITS = AdmissionLimits(
    max_queued_jobs=12,
    max_queued_tokens=40,
    max_queue_share_per_tenant=0.9,
    max_queued_jobs_per_tenant=6,
    max_queued_tokens_per_tenant=22,
    max_jobs_per_tenant=9,
)
# Mostly none; few enough keys for several jobs to meet over one.
IDEMPOTENCIES = (
    *(None,) * 6,
    *(Idempotency(key, body) for key in ("k1", "k2", "k3") for body in ("b1", "b2")),
)
FRONTENDS = ("fe1", "fe2")


async def known_models(target: Target) -> dict[str, bytes]:
    """What the store knows, but for how long: each server has a clock of its own."""
    return {name: model.card for name, model in (await target.registry.models()).items()}


class Walk:
    """One walk. `run` raises AssertionError with the seed and the step."""

    def __init__(self, targets: Sequence[Target], seed: int) -> None:
        self.targets = targets
        self.mirrors = Mirrors(targets)
        self.seed = seed
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()  # what happened, by its name
        self.ledger = Ledger()
        self.jobs = self.ledger.jobs
        self.num_jobs = 0
        self.workers: list[str] = []
        self.num_workers = 0
        self.streams: dict[tuple[str, str], Stream] = {}  # what each worker believes it runs
        self.spoken: list[tuple[str, Append]] = []  # to be said again
        self.newer: set[str] = set()
        self.drained: set[str] = set()  # workers whose order the server has
        self.paused: set[str] = set()  # models
        self.dead_frontends: set[str] = set()  # the graces they start are short
        self.preempted: Counter[str] = Counter()  # jobs that gave way to earlier lanes
        self.touched: set[str] = set()

    async def run(self, num_steps: int, check_every: int) -> None:
        step, action = 0, "start"
        try:
            for _ in range(3):
                await self._replace_worker()
            await self._submit()  # so that all have the key that reap writes on real servers alone
            actions, weights = list(WEIGHTS), list(WEIGHTS.values())
            for step in range(1, num_steps + 1):
                (action,) = self.rng.choices(actions, weights)
                self.touched.clear()
                await self._forget_the_time()
                await getattr(self, f"_{action}")()
                self.done[action] += 1
                touched = sorted(self.touched)
                await self.mirrors.everywhere(lambda target, ids: target.jobs(ids), touched)
                if step % check_every == 0 or step == num_steps:
                    action = "check"
                    await self._check_everything()
            action = "end"
            await self._end()
        except BaseException as error:
            error.add_note(f"seed {self.seed}, step {step}, {action}")
            raise

    # --- the frontend's side ---------------------------------------------------------------

    async def _submit(self) -> None:
        rng = self.rng
        self.num_jobs += 1
        job = make_job(
            f"0-job{self.num_jobs}",
            model=rng.choice(MODELS),
            prompt=range(rng.randint(1, 6)),
            tenant=rng.choice("abc"),
            lane=rng.choice((0, 0, 1, 3, 7)),
            timeout_ms=FAR_MS,
            queue_timeout_ms=rng.choice((None, FAR_MS // 2)),
            on_disconnect=rng.choice(list(OnDisconnect)),
            client_request_id=rng.choice((None, "crid")),
            num_choices=rng.choice((1, 1, 2)),
            idempotency=rng.choice(IDEMPOTENCIES),
        )
        assert is_job_id(job.job_id)
        frontend = rng.choice(("", *FRONTENDS, "fe1#1", "fe2#2"))
        try:
            await self.mirrors.everywhere(lambda target: target.store.submit(job, LIMITS, frontend))
        except QueueFull as error:
            self.done[f"full: {error.scope}"] += 1
            return
        except KeyTaken as error:
            self.done[f"key taken: {error.same_request}"] += 1
            return
        self.jobs[job.job_id] = job
        self.touched.add(job.job_id)

    async def _submit_again(self) -> None:
        if job_id := self._any_job():
            job = self.jobs[job_id]
            await self.mirrors.everywhere(lambda target: target.store.submit(job, LIMITS, "fe1"))

    async def _requeue(self) -> None:
        """A dead letter, mostly; or of a job that has none."""
        letters = await self.mirrors.everywhere(lambda target: target.letters())
        old_id = self.rng.choice(letters) if letters else self._any_job()
        if not old_id:
            return
        self.num_jobs += 1
        job = make_job(
            f"0-job{self.num_jobs}",
            (1, 2),
            model=self.rng.choice(MODELS),
            tenant=self.rng.choice("abc"),
            timeout_ms=FAR_MS,
        )
        try:
            taken_by = await self.mirrors.everywhere(
                lambda target: target.store.requeue(old_id, job, LIMITS)
            )
        except QueueFull:
            return
        if taken_by == job.job_id:
            self.done["requeued"] += 1
            self.ledger.num_letters_gone += 1
            self.jobs[job.job_id] = job
            self.touched.add(job.job_id)

    async def _drop_dead_letter(self) -> None:
        letters = await self.mirrors.everywhere(lambda target: target.letters())
        if letters:
            gone = self.rng.choice(letters)
            self.ledger.num_letters_gone += 1
            assert await self.mirrors.everywhere(lambda target: target.drop_letter(gone))

    async def _cancel(self) -> None:
        if job_id := self._any_job():
            reason = self.rng.choice(("cancelled", "disconnected", "by_hand"))
            await self.mirrors.everywhere(lambda target: target.store.cancel(job_id, reason))

    async def _attach(self) -> None:
        if job_id := self._any_job():
            reader = self._reader()
            await self.mirrors.everywhere(lambda target: target.store.attach([(job_id, reader)]))

    async def _detach(self) -> None:
        if job_id := self._any_job():
            reader = self._reader()
            await self.mirrors.everywhere(lambda target: target.store.detach(job_id, reader))

    async def _frontend_heartbeat(self) -> None:
        frontend = self.rng.choice(FRONTENDS)
        self.dead_frontends.discard(frontend)
        await self.mirrors.everywhere(
            lambda target: target.store.frontend_heartbeat(frontend, FAR_MS)
        )

    async def _reap(self) -> None:
        await self.mirrors.everywhere(lambda target: target.store.reap())

    async def _look(self) -> None:
        if job_id := self._any_job():
            await self.mirrors.everywhere(lambda target: target.position(job_id))
            after = Cursor(self.rng.randrange(6), self.rng.randrange(12))
            await self.mirrors.everywhere(lambda target: target.store.read_log(job_id, after, 3))
        key = self.rng.choice(("k1", "k2", "k3"))
        await self.mirrors.everywhere(lambda target: target.store.kept_key(key))
        state = self.rng.choice((None, *JobState))
        await self.mirrors.everywhere(lambda target: target.listed(state))
        await self.mirrors.everywhere(lambda target: target.registry.queue_stats())
        await self.mirrors.everywhere(known_models)

    # --- the workers' side -----------------------------------------------------------------

    async def _pull(self) -> None:
        worker, count = self._worker(), self.rng.randint(1, 4)
        await asyncio.sleep(2 * SHORT_MS / 1000)  # of any server's clock all jobs are as old
        taken = await self.mirrors.everywhere(
            lambda target: target.queue(worker).pull(worker, count, 0)
        )
        for delivery in taken:
            fields = await self.targets[0].hash(delivery.job.job_id)
            self.done[f"placed: {fields['placed']}"] += 1
        self._take_new(worker, taken)

    async def _overtake(self) -> None:
        """Of a worker whose slots later lanes hold."""
        worker, count, lane = self._worker(), self.rng.randint(1, 4), self.rng.randint(1, 7)
        taken = await self.mirrors.everywhere(
            lambda target: target.queue(worker).overtake(worker, count, lane, 0)
        )
        queues = {await self.targets[0].lane_of(one.job.job_id) for one in taken}
        assert all(queue < lane for queue in queues), f"of lanes {queues}, not before {lane}"
        if taken:
            self.done["overtook"] += 1
        self._take_new(worker, taken)

    async def _oversubscribe(self) -> None:
        worker, left_out = self._worker(), self.rng.sample("abc", self.rng.randint(0, 2))
        taken = await self.mirrors.everywhere(
            lambda target: target.queue(worker).oversubscribe(worker, 2, left_out)
        )
        self._take_new(worker, taken)

    async def _recover(self) -> None:
        worker, count = self._worker(), self.rng.randint(1, 4)
        suspects, before = self.rng.random() < 0.8, self.rng.choice((NUM_LANES, NUM_LANES, 1, 3))
        taken = await self.mirrors.everywhere(
            lambda target: target.queue(worker).recover(
                worker, count, suspects=suspects, before=before
            )
        )
        assert all(one.job.lane < before for one in taken), f"of a lane not before {before}"
        self._take_new(worker, taken)

    async def _recover_after_outage(self) -> None:
        await self.mirrors.everywhere(lambda target: target.fall_silent())
        await self._recover()

    async def _reconcile(self) -> None:
        worker = self._worker()
        known = {job_id for name, job_id in self.streams if name == worker}
        if known and self.rng.random() < 0.3:
            known.remove(self.rng.choice(sorted(known)))
        taken = await self.mirrors.everywhere(
            lambda target: target.queue(worker).reconcile(worker, frozenset(known))
        )
        self._take(worker, taken)

    async def _claim_late(self) -> None:
        """A worker saw the job in its pending list long ago; the reply is lost."""
        mine = sorted(self.streams)
        worker, job_id = self.rng.choice(mine) if mine else (self._worker(), self._any_job())
        if mine and self.rng.random() < 0.5:
            worker = self._worker()
        if job_id not in self.jobs:
            return
        self.touched.add(job_id)
        verdict = await self.mirrors.everywhere(lambda target: target.claim_late(worker, job_id))
        self.done[f"late claim: {verdict}"] += 1

    async def _append(self) -> None:
        worker = self._worker()
        mine = [stream for (name, _), stream in sorted(self.streams.items()) if name == worker]
        chosen = self.rng.sample(mine, min(len(mine), self.rng.randint(1, 4)))
        items = [random_append(self.rng, stream) for stream in chosen]
        await self._say(worker, items)

    async def _say_again(self) -> None:
        if self.spoken:
            worker, item = self.rng.choice(self.spoken[-40:])
            await self._say(worker, [item])

    async def _release(self) -> None:
        held = sorted(self.streams)
        if not held:
            return
        worker, job_id = self.rng.choice(held)
        attempt = self.streams.pop((worker, job_id)).attempt - (self.rng.random() < 0.1)
        self.touched.add(job_id)
        await self.mirrors.everywhere(
            lambda target: target.queue(worker).release(worker, job_id, attempt)
        )

    async def _preempt(self) -> None:
        """A job gives its slot up to one of an earlier lane, and is given back."""
        held = sorted(key for key in self.streams if key[1] in self.jobs and self.jobs[key[1]].lane)
        if not held:
            return
        worker, job_id = self.rng.choice(held)
        stream = self.streams.pop((worker, job_id))
        self.touched.add(job_id)
        count = self.preempted[job_id] + 1
        if await self.mirrors.everywhere(
            lambda target: target.queue(worker).release(worker, job_id, stream.attempt, count)
        ):
            self.preempted[job_id] = count
            self.done["given back"] += 1

    async def _suspect(self) -> None:
        """Of a job that runs: its next crash is its last."""
        if held := sorted(self.streams):
            _, job_id = self.rng.choice(held)
            await self.mirrors.everywhere(lambda target: target.set_if_live(job_id, "crashes", 3))

    async def _crash(self) -> None:
        """A worker's engine died with some of its jobs."""
        worker = self._worker()
        mine = [job_id for name, job_id in sorted(self.streams) if name == worker]
        lost = self.rng.sample(mine, min(len(mine), self.rng.randint(1, 3)))
        jobs = [(job_id, self.streams.pop((worker, job_id)).attempt) for job_id in lost]
        self.touched.update(lost)
        cause = self.rng.choice(list(CrashCause))
        await self.mirrors.everywhere(
            lambda target: target.queue(worker).crashed(worker, jobs, cause)
        )

    async def _heartbeat(self, worker: str = "") -> None:
        worker = worker or self._worker()
        running = [
            (job_id, stream.attempt - (self.rng.random() < 0.1))
            for (name, job_id), stream in sorted(self.streams.items())
            if name == worker
        ]
        self.touched.update(job_id for job_id, _ in running)
        models = self.targets[0].models_of(worker)
        stats: dict[str, float | str] = {"step": self.rng.randrange(100), "device": "none"}
        is_draining = self.rng.random() < 0.2
        report = WorkerReport(worker, FAR_MS, models, stats, running, draining=is_draining)
        reply = await self.mirrors.everywhere(lambda target: target.queue(worker).heartbeat(report))
        dropped = [*reply.dropped, *reply.lost]
        for job_id in dropped:
            del self.streams[worker, job_id]
        if dropped:
            self.done["drops"] += 1

    async def _note_prefixes(self) -> None:
        """The cache has grown, or lost some; of prompts that any of the tenants may submit."""
        worker = self._worker()
        held: list[bytes] = []
        for tenant in "abc":
            joined = digests_of_prompt(tenant, range(self.rng.randint(2, 6)))
            held += [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]
        lost = self.rng.sample(held, self.rng.randrange(len(held) // 2))
        is_first = self.rng.random() < 0.2
        await self.mirrors.everywhere(
            lambda target: target.queue(worker).note_prefixes(
                worker, FAR_MS, held, lost, is_first=is_first
            )
        )

    async def _announce(self) -> None:
        model, digest = self.rng.choice(MODELS), self.rng.choice(("d1", "d2", "d3"))
        worker = self._worker()
        blobs = {digest: digest.encode()}
        await self.mirrors.everywhere(
            lambda target: target.queue(worker).announce(model, b"{}", blobs)
        )
        await self.mirrors.everywhere(lambda target: target.registry.get_blob(digest))

    async def _order(self) -> None:
        worker, order = self._worker(), self.rng.choice((Order.DRAIN, Order.SERVE, Order.SERVE))
        found = await self.mirrors.everywhere(lambda target: target.registry.order(worker, order))
        if found is Ordered.OK:
            (self.drained.add if order is Order.DRAIN else self.drained.discard)(worker)

    async def _pause(self) -> None:
        model = self.rng.choice(MODELS)
        if model in self.paused:
            await self._resume(model)
        elif await self.mirrors.everywhere(lambda target: target.registry.pause(model, "who")):
            self.paused.add(model)

    async def _resume(self, model: str) -> None:
        await self.mirrors.everywhere(lambda target: target.registry.resume(model))
        self.paused.discard(model)

    async def _retire(self) -> None:
        worker = self._worker()
        await self.mirrors.everywhere(lambda target: target.queue(worker).retire(worker))
        await self._replace_worker(worker)

    # --- what befalls them -----------------------------------------------------------------

    async def _lose_lease(self) -> None:
        """The worker lives on; its next heartbeat brings the lease back."""
        worker = self._worker()
        self.drained.discard(worker)  # who buries it deletes the order
        await self.mirrors.everywhere(lambda target: target.queue(worker).declare_dead(worker))

    async def _replace_worker(self, old: str = "") -> None:
        """The old one is gone without a word, but what it sent may still arrive."""
        if len(self.workers) >= 3:
            old = old or self._worker()
            self.workers.remove(old)
            await self.mirrors.everywhere(lambda target: target.queue(old).declare_dead(old))
            for key in [key for key in self.streams if key[0] == old]:
                stream = self.streams.pop(key)
                self.spoken.append((old, stream.append([1], "z")))
        self.num_workers += 1
        worker = f"w{self.num_workers:05}"
        self.workers.append(worker)
        await self.mirrors.everywhere(
            lambda target: target.queue(worker).setup(target.models_of(worker))
        )
        await self._heartbeat(worker)

    async def _pass_deadline(self) -> None:
        if job_id := self._any_job():
            await self.mirrors.everywhere(lambda target: target.pass_deadline(job_id))

    async def _pass_queue_deadline(self) -> None:
        """Nothing comes of it where the job was begun before."""
        if job_id := self._any_job():
            await self.mirrors.everywhere(lambda target: target.pass_queue_deadline(job_id))

    async def _pass_grace(self) -> None:
        if job_id := self._any_job():
            await self.mirrors.everywhere(lambda target: target.set_if_live(job_id, "orphan_ms", 1))

    async def _lose_frontend(self) -> None:
        frontend = self.rng.choice(FRONTENDS)
        self.dead_frontends.add(frontend)
        await self.mirrors.everywhere(
            lambda target: target.redis.delete(target.keys.frontend(frontend))
        )

    async def _lose_request(self) -> None:
        if job_id := self._any_job():
            await self.mirrors.everywhere(
                lambda target: target.redis.delete(target.keys.request(job_id))
            )

    async def _spoil_request(self) -> None:
        if job_id := self._any_job():
            await self.mirrors.everywhere(
                lambda target: target.redis.set(
                    target.keys.request(job_id), b"{", xx=True, keepttl=True
                )
            )

    async def _lose_log(self) -> None:
        """Of a job that nobody runs: who takes it up finds that it cannot be resumed."""
        if job_id := self._any_job():
            await self.mirrors.everywhere(lambda target: target.lose_log_of_queued(job_id))

    async def _write_newer(self) -> None:
        """A newer release wrote this job; or the jobs it wrote may now be taken by all."""
        newer, self.newer = self.newer & self.jobs.keys(), set()
        for job_id in sorted(newer):
            await self.mirrors.everywhere(lambda target, id: target.set_if_live(id, "v", 1), job_id)
        if not newer and (job_id := self._any_job()):
            self.newer.add(job_id)
            await self.mirrors.everywhere(lambda target: target.write_as_newer(job_id))

    async def _flush_scripts(self) -> None:
        await self.mirrors.everywhere(lambda target: target.redis.script_flush())

    # --- words ------------------------------------------------------------------------------

    async def _say(self, worker: str, items: list[Append]) -> None:
        self.touched.update(item.job_id for item in items)
        results = await self.mirrors.everywhere(
            lambda target: target.queue(worker).append(worker, FAR_MS, items)
        )
        for item, result in zip(items, results, strict=True):
            self.done[f"append: {result.status}"] += 1
            self.spoken.append((worker, item))
            stream = self.streams.get((worker, item.job_id))
            if stream is None or stream.attempt != item.attempt:
                continue
            if result.status is AppendStatus.OK and stream.cursor == item.delta.start:
                stream.accept(item)
            if result.status is AppendStatus.ENDED or (
                result.status is AppendStatus.OK and item.end_of_job
            ):
                del self.streams[worker, item.job_id]
        del self.spoken[:-200]

    def _take_new(self, worker: str, deliveries: Sequence[Delivery]) -> None:
        assert not (deliveries and worker in self.drained), "a drained worker took a job"
        models = {delivery.job.model for delivery in deliveries}
        assert not models & self.paused, "somebody took a job of a paused queue"
        self._take(worker, deliveries)

    def _take(self, worker: str, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            job_id = delivery.job.job_id
            self.touched.add(job_id)
            self.done["resumed" if delivery.output_token_ids else "claimed"] += 1
            assert delivery.num_lane_preemptions == self.preempted[job_id], job_id
            if self.rng.random() < 0.9:  # else its reply was lost
                self.streams[worker, job_id] = Stream(delivery)

    async def _forget_the_time(self) -> None:
        """However slow this machine is, nobody takes it for an outage of the server."""
        await self.mirrors.everywhere(lambda target: target.forget_silence())
        if self.dead_frontends:
            await self.mirrors.everywhere(lambda target: target.stretch_graces())

    # --- choosing ---------------------------------------------------------------------------

    def _worker(self) -> str:
        return self.rng.choice(self.workers)

    def _any_job(self) -> str:
        """Mostly a late one; '' when there is none."""
        if not self.jobs:
            return ""
        job_id = self.rng.choice(list(self.jobs)[-40:])
        self.touched.add(job_id)
        return job_id

    def _reader(self) -> str:
        return self.rng.choice(FRONTENDS) + self.rng.choice(("", "#1", "#2"))

    # --- checking ---------------------------------------------------------------------------

    async def _check_everything(self) -> None:
        """All that is stored reads alike, and is true; a few old jobs expire."""
        await self.mirrors.compare_everything()
        for job_id in await self.ledger.settle(self.targets):
            await self.mirrors.everywhere(lambda target, id: target.expire(id), job_id)

    async def _end(self) -> None:
        """Nothing is left of what has ended, and no consumer of who is gone."""
        for job_id in self.jobs:
            await self.mirrors.everywhere(
                lambda target, id: target.store.cancel(id, "cancelled"), job_id
            )
            log = await self.mirrors.everywhere(
                lambda target, id: target.store.read_log(id, START, 4096), job_id
            )
            assert len(log) >= 1, job_id
        await self._check_everything()
        for model in sorted(self.paused):
            await self._resume(model)
        for worker in self.workers:
            await self.mirrors.everywhere(
                lambda target, name: target.queue(name).retire(name), worker
            )
        await self._forget_the_time()
        self.workers.clear()
        self.streams.clear()
        self.num_workers += 3 - self.num_workers % 3  # one that serves all models
        await self._replace_worker()
        await self._recover()
        for target in self.targets:
            await target.assert_swept(self.workers)

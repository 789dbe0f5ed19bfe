"""Every step that can follow a world, and what must hold of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.sim.protocol import relay, scripts
from tests.sim.protocol.bugs import Bug
from tests.sim.protocol.world import (
    ABSENT,
    FINISHED,
    FORGOTTEN,
    NOBODY,
    NOTHING_SENT,
    QUEUED,
    RUNNING,
    TERMINAL,
    USED,
    Copy,
    Frame,
    Job,
    Step,
    Vocabulary,
    Words,
    Worker,
    World,
)

MAX_PREEMPTIONS = 1  # of the job, for one of an earlier lane: running_slots.py bounds them


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The rules of one run.

    `num_faults` is how many of these may happen, in any mixture and at any time: a worker is killed
    (at most one) or retires, a lease ends although its worker lives, the reply to a claim, a
    heartbeat or an append is lost, an append arrives late, a release is lost, a worker gives its
    job back, a frame is lost, the subscription breaks, the server is rolled back to any earlier
    moment (once, with `rollback`; frames are then lost with their connection only, as TCP has it,
    no record goes then). With `replaced` the second worker has other files than the job was
    prepared with. With `lanes` the job may be left to the worker that holds its prefix, and gives
    way to one of an earlier lane, at most MAX_PREEMPTIONS times.
    """

    num_faults: int
    num_tokens: int = 2
    rollback: bool = False
    replaced: bool = False
    lanes: bool = False
    bug: Bug | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)

    def steps(self, world: World) -> Iterator[Step]:
        yield from self._frontend(world)
        yield from self._reader(world)
        yield from self._network(world)
        for number, worker in enumerate(world.workers):
            if number == 1 and not self.replaced and _are_alike(world):
                return  # whatever the second may do the first may
            yield from self._lease(world, number, worker)
            if worker.alive:
                yield from self._claims(world, number, worker)
                yield from self._leaving(world, number, worker)
                if worker.copy is not None:
                    yield from self._run(world, number, worker, worker.copy)

    def violation(self, before: World, step: Step) -> str | None:
        """The sentence of an invariant that the step breaks."""
        old, new, reader = before.job, step.world.job, step.world.reader
        if self.replaced and new.owner == 1:
            return "a worker with other files runs the job"
        if new.state == RUNNING and new.owner != new.entry:
            return "the job runs with a worker, and another one's death would end its attempt"
        if old is not new and old != new:
            if not self.vocabulary.is_one_history(new.tokens):
                return "the log mixes two histories, or holds tokens twice"
            is_over = old.state in TERMINAL or old.state == FORGOTTEN
            if is_over and step.label not in ("rollback", "forget"):
                return "something changed after the end"
            is_rolled_back = before.snapshot == USED
            if step.speaker and step.speaker != old.stamp and not is_rolled_back:
                return "another attempt than the latest spoke"
        if new.state == ABSENT and not step.label.startswith(("release", "retire", "kill")):
            pairs = zip(before.workers, step.world.workers, strict=True)
            if any(was.copy is not None and now.copy is None for was, now in pairs):
                return "a job that the server has lost was dropped by who holds it"
        if reader is not before.reader:
            if not self.vocabulary.is_one_history(reader.got):
                return "the reader's text is a splice"
            logged = new.tokens
            if not self.rollback and reader.got != logged[: len(reader.got)]:
                return "the reader holds what is not in the log"
            is_finished = new.state in (FINISHED, FORGOTTEN)
            if reader.end == FINISHED and not (reader.got == logged and is_finished):
                return "the reader was told of an end that is not its text's"
        return None

    @staticmethod
    def is_over(world: World) -> bool:
        return bool(world.reader.end) and world.job.state not in (QUEUED, RUNNING)

    # --- the frontend's side ---------------------------------------------------------------

    def _frontend(self, world: World) -> Iterator[Step]:
        job = world.job
        if job.state == ABSENT:
            # Also after a rollback: a reader who has nothing yet submits the same id again.
            if not world.reader.got and not world.reader.end:
                yield Step("submit", world._replace(job=scripts.submit(job)))
                if self.lanes:
                    left = scripts.submit(job, left_to=0)
                    yield Step("submit, left to 0", world._replace(job=left))
            return
        waited = scripts.wait_long_enough(job)
        if waited is not None and self.bug is not Bug.LEFT_TO_A_WORKER_FOR_GOOD:
            yield Step("waits long enough", world._replace(job=waited))
        if job.state in TERMINAL and not self.rollback:
            yield Step("forget", world._replace(job=scripts.forget(job)), False)
        yield from _ended(world, "cancel", *scripts.finish(job, self.bug))
        yield from _ended(world, "reap", *scripts.reap(job))

    def _reader(self, world: World) -> Iterator[Step]:
        reader, channel = world.reader, world.channel
        if reader.end or (world.job.state == ABSENT and not reader.got):
            return
        seen = relay.look(reader, world.job, self.bug)
        if seen != reader and self.bug is not Bug.NO_IDLE_LOOK:
            yield Step("look", world._replace(reader=seen))
        if channel.resync:
            read = relay.resync(reader, world.job, self.bug)
            upon = world._replace(reader=read, channel=channel._replace(resync=False))
            yield Step("resync", upon)
        elif channel.frames:
            frame, *rest = channel.frames
            heard = relay.hear(reader, frame, self.bug)
            left = channel._replace(frames=tuple(rest), resync=heard is None)
            yield Step("hear", world._replace(reader=heard or reader, channel=left))
        if not channel.up:
            again = channel._replace(up=True, resync=True)
            yield Step("reconnect", world._replace(channel=again))

    # --- what befalls them -----------------------------------------------------------------

    def _network(self, world: World) -> Iterator[Step]:
        if world.late is not None:
            job, _, frames = scripts.append(world.job, world.late, self.bug)
            after = _said(world, job, frames)._replace(late=None)
            yield Step(f"late append{world.late.worker}", after, False, world.late.stamp)
        if not world.faults:
            return
        channel = world.channel
        if channel.up and world.job.state != ABSENT and not world.reader.end:
            broken = channel._replace(up=False, resync=False, frames=())
            yield Step("break", _fault(world)._replace(channel=broken), False)
        if channel.frames and not self.rollback:
            rest = channel._replace(frames=channel.frames[1:])
            yield Step("frame is lost", _fault(world)._replace(channel=rest), False)
        if self.rollback and world.snapshot is None:
            yield Step("snapshot", world._replace(snapshot=world.job), False)
        elif isinstance(world.snapshot, Job) and world.snapshot != world.job:
            first, second = (worker._replace(looking=False) for worker in world.workers)
            after = _fault(world)._replace(
                job=world.snapshot,
                snapshot=USED,
                channel=channel._replace(up=False, resync=False, frames=()),
                workers=(first, second),
            )
            yield Step("rollback", after, False)

    def _lease(self, world: World, number: int, worker: Worker) -> Iterator[Step]:
        if worker.lease and (world.faults or not worker.alive):
            after = _with(world, number, worker._replace(lease=False))
            if worker.alive:
                yield Step(f"lease ends{number}", _fault(after), False)
            else:
                yield Step(f"lease ends{number}", after)
        copy = worker.copy
        dropped = copy is not None and scripts.is_dropped(world.job, number, copy.attempt)
        if worker.alive and (dropped or not worker.lease):
            beaten = worker._replace(lease=True, copy=None if dropped else copy)
            yield Step(f"heartbeat{number}", _with(world, number, beaten))
            if world.faults and dropped and not worker.lease:
                unaware = _fault(_with(world, number, worker._replace(lease=True)))
                yield Step(f"heartbeat{number}, its reply is lost", unaware, False)

    def _leaving(self, world: World, number: int, worker: Worker) -> Iterator[Step]:
        if not world.faults or not all(other.alive for other in world.workers):
            return
        gone = Worker(alive=False, lease=worker.lease, looking=False, copy=None)
        yield Step(f"kill{number}", _fault(_with(world, number, gone)), False)
        given = _with(world, number, gone._replace(lease=False))
        job = scripts.retire(world.job, number)
        yield Step(f"retire{number}", _fault(given)._replace(job=job), False)

    # --- a worker's intake -----------------------------------------------------------------

    def _claims(self, world: World, number: int, worker: Worker) -> Iterator[Step]:
        job, bug = world.job, self.bug
        if worker.looking:
            requested = _with(world, number, worker._replace(looking=False))
            stamp = world.claims + 1
            claimed = scripts.claim_seen(job, number, stamp, bug) if worker.lease else None
            yield from _claimed(requested, number, "claim", claimed)
            return  # the intake does one thing after the other
        if job.entry == number and worker.copy is None and bug is not Bug.NO_RECONCILE:
            yield Step(f"reconcile{number}", _with(world, number, worker._replace(looking=True)))
        if not worker.lease:
            return
        first, second = world.workers
        leases = (first.lease, second.lease)
        if self.replaced and number == 1 and bug is not Bug.CLAIM_OF_OTHER_FILES:
            aside = scripts.set_aside(job, number, leases, bug)
            if aside is not None:
                yield Step(f"set aside{number}", _said(world, *aside))
            return
        pulled = scripts.pull(job, number, world.claims + 1)
        if pulled is not None:
            yield from _claimed(world, number, "pull", pulled)
            ahead = scripts.pull_ahead(job, number, world.claims + 1)
            yield from _claimed(world, number, "pull ahead", ahead)
        again = scripts.deliver_again(job, number, world.claims + 1, bug)
        if again is not None and again.attempt == job.attempt:
            yield Step(f"deliver again{number}", world._replace(job=again))
        elif again is not None:
            yield from _claimed(world, number, "deliver again", again)
        taken = scripts.recover(job, number, leases, world.claims + 1, bug)
        if taken is not None:
            if bug is Bug.RECOVER_BURIES_THE_PENDING and job.entry >= 0:
                yield Step(f"bury{number}", world._replace(job=job._replace(entry=NOBODY)))
            yield from _claimed(world, number, "recover", taken)

    # --- a worker's engine and publisher ---------------------------------------------------

    def _run(self, world: World, number: int, worker: Worker, copy: Copy) -> Iterator[Step]:
        faulty = _fault(world)
        if scripts.is_lost(world.job, copy.attempt) or self.bug is Bug.RESTORE_WITHOUT_FENCE:
            yield from self._put_back(world, number, worker, copy)
        for words in self._appends(number, copy):
            offered = copy._replace(tokens=words.tokens)
            job, verdict, frames = scripts.append(world.job, words, self.bug)
            settled = worker._replace(copy=_settled(offered, words, verdict, self.bug))
            after = _said(_with(world, number, settled), job, frames)
            if after != world:
                yield Step(f"append{number} to {len(words.tokens)}", after, True, copy.stamp)
            if self.bug is Bug.PUBLISH_BEFORE_LOG:
                first = Frame(words.start, words.tokens[words.start :], "")
                early = relay.publish(world.channel, (first,))
                yield Step(f"publish{number}", world._replace(channel=early))
            if world.faults:
                # Given up on and offered again: the first may still arrive (at once: a lost reply).
                again = worker._replace(copy=offered._replace(sent=len(words.tokens)))
                after = _with(faulty, number, again)._replace(late=words)
                yield Step(f"append{number} to {len(words.tokens)} times out", after, False)
        if world.faults:
            left = _with(faulty, number, worker._replace(copy=None))
            released = scripts.release(world.job, number, copy.attempt, self.bug)
            yield Step(f"release{number}", left._replace(job=released), False, copy.stamp)
            yield Step(f"release{number} is lost", left, False)

        if self.lanes and world.job.preemptions < MAX_PREEMPTIONS:
            gone = _with(world, number, worker._replace(copy=None))
            given = scripts.preempt(world.job, number, copy.attempt, self.bug)
            if given != world.job:
                yield Step(f"preempt{number}", gone._replace(job=given), False, copy.stamp)

    def _put_back(self, world: World, number: int, worker: Worker, copy: Copy) -> Iterator[Step]:
        """Publisher: what the server has lost is said again from the start."""
        if not worker.lease:
            return
        job = (
            None
            if self.bug is Bug.NO_RESTORE
            else scripts.restore(world.job, number, copy, self.bug)
        )
        if job is None:
            yield Step(f"drop{number}", _with(world, number, worker._replace(copy=None)))
            return
        again = copy._replace(accepted=0, sent=NOTHING_SENT)
        after = _with(world, number, worker._replace(copy=again))._replace(job=job)
        yield Step(f"restore{number}", after, True, copy.stamp)

    def _appends(self, number: int, copy: Copy) -> Iterator[Words]:
        """The same again while the last one is not settled; else with any number of new tokens.
        The end travels with the last."""
        known = copy.tokens
        lengths = range(max(copy.accepted + 1, len(known)), self.num_tokens + 1)
        if copy.sent != NOTHING_SENT:
            lengths = range(copy.sent, copy.sent + 1)
        elif copy.accepted == self.num_tokens:
            lengths = range(self.num_tokens, self.num_tokens + 1)
        for length in lengths:
            while len(known) < length:
                known = (*known, self.vocabulary.sample(known, copy.stamp))
            ends = length == self.num_tokens
            yield Words(number, copy.attempt, copy.stamp, copy.accepted, known[:length], ends)


def _settled(copy: Copy, words: Words, verdict: str, bug: Bug | None) -> Copy | None:
    """Publisher: what becomes of a copy whose append was answered. None: it is dropped."""
    if verdict == "ok":
        if words.ends:
            return None
        return copy._replace(accepted=len(words.tokens), sent=NOTHING_SENT)
    if verdict.startswith("gap:"):
        if bug is Bug.NO_REWIND:
            return copy
        log_end = int(verdict.removeprefix("gap:"))
        if log_end <= len(copy.tokens):
            return copy._replace(accepted=log_end, sent=NOTHING_SENT)
    if verdict == "gone":
        return copy  # to be put back, or dropped
    return None


def _claimed(world: World, number: int, label: str, job: Job | None) -> Iterator[Step]:
    """A claim whose reply comes, or is lost. None: there was nothing to claim."""
    if job is None or job.state != RUNNING:
        yield Step(f"{label}{number}", world if job is None else world._replace(job=job))
        return
    after = world._replace(job=job, claims=world.claims + 1)
    if world.faults:
        yield Step(f"{label}{number}, its reply is lost", _fault(after), False)
    worker, tokens = world.workers[number], job.tokens
    if worker.copy is None or worker.copy.attempt < job.attempt:
        end = len(tokens)
        copy = Copy(job.attempt, job.stamp, end, tokens, NOTHING_SENT)
        after = _with(after, number, worker._replace(copy=copy))
    yield Step(f"{label}{number}", after)


def _are_alike(world: World) -> bool:
    """True while nothing tells the workers apart."""
    first, second = world.workers
    named = (world.job.owner, world.job.entry)
    return first == second and max(named) < 0 and world.late is None and world.snapshot is None


def _ended(world: World, label: str, job: Job, frames: tuple[Frame, ...]) -> Iterator[Step]:
    if job != world.job:
        yield Step(label, _said(world, job, frames), False)


def _said(world: World, job: Job, frames: tuple[Frame, ...]) -> World:
    if not frames or world.reader.end:
        return world._replace(job=job)
    return world._replace(job=job, channel=relay.publish(world.channel, frames))


def _with(world: World, number: int, worker: Worker) -> World:
    first, second = world.workers
    return world._replace(workers=(worker, second) if number == 0 else (first, worker))


def _fault(world: World) -> World:
    return world._replace(faults=world.faults - 1)

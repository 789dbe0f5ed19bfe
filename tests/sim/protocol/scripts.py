"""The transitions of shared/transport/lua, one function each, on a Job and nothing else.

Each returns the job after it, with what the script answers and the frames it publishes where these
matter. What the model leaves out of a script: counters, times to live, blame and quarantine (to the
rest, crashed is a release), the time after an outage in which ended leases mean nothing and time
stands still (recover and reap then come later), a clock that is set (here reap comes, and a lease
ends, at any time), attach and detach (what they lead to is a cancel; test_readers.py has them),
lanes, portions, limits, orders, pauses and keys (they decide whether and when, not what; but a job
may be claimed ahead of its turn, left to the worker with its prefix, or give way to another),
several jobs (tests/contract has their order), how long a tombstone stands and who may put a job
back for how long (nobody here is out of reach for ten minutes).
"""

from __future__ import annotations

from tests.sim.protocol.bugs import Bug
from tests.sim.protocol.world import (
    ABSENT,
    ASIDE,
    CANCELLED,
    EXPIRED,
    FINISHED,
    FORGOTTEN,
    NEW,
    NOBODY,
    QUEUED,
    RELEASED,
    REPLACED,
    RUNNING,
    TERMINAL,
    Copy,
    Frame,
    Job,
    Words,
)

Frames = tuple[Frame, ...]


def submit(job: Job, left_to: int = NOBODY) -> Job:
    """A repeat (DUP) changes nothing. `left_to` holds the job's prefix."""
    return job._replace(state=QUEUED, entry=NEW, left_to=left_to) if job.state == ABSENT else job


def latch(job: Job, state: str) -> tuple[Job, Frames]:
    ended = job._replace(state=state, entry=NOBODY, is_ahead=False, left_to=NOBODY)
    return ended, (Frame(len(job.tokens), (), state),)


def claim(job: Job, worker: int, stamp: int, bug: Bug | None = None) -> Job:
    """lib/claim.lua: what pull, recover and reconcile end in. The entry stays where it is."""
    if job.state not in (QUEUED, RUNNING):
        return job._replace(entry=NOBODY)
    kept = bug is Bug.CLAIM_KEEPS_THE_ATTEMPT and job.attempt > 0
    attempt = job.attempt if kept else job.attempt + 1
    return job._replace(state=RUNNING, owner=worker, attempt=attempt, stamp=stamp)


def claim_seen(job: Job, worker: int, stamp: int, bug: Bug | None = None) -> Job | None:
    """claim.lua, of an entry that a reconcile has seen. None: another one holds it now."""
    if job.entry != worker and bug is not Bug.CLAIM_OF_A_SEEN_ENTRY:
        return None
    return claim(job, worker, stamp, bug)


def pull(job: Job, worker: int, stamp: int) -> Job | None:
    """None: nothing new, or left to another. Delivers and claims in one step."""
    if job.entry != NEW or job.left_to not in (NOBODY, worker):
        return None
    return claim(job._replace(entry=worker, left_to=NOBODY), worker, stamp)


def wait_long_enough(job: Job) -> Job | None:
    """After AFFINITY_WAIT_MS any worker may take a job, whatever its portion. None: it is left to
    nobody."""
    return None if job.left_to == NOBODY else job._replace(left_to=NOBODY)


def pull_ahead(job: Job, worker: int, stamp: int) -> Job | None:
    """lib/affinity.lua: as `pull`, before the group has come to the entry."""
    pulled = pull(job, worker, stamp)
    return None if pulled is None else pulled._replace(is_ahead=True)


def deliver_again(job: Job, worker: int, stamp: int, bug: Bug | None = None) -> Job | None:
    """pull of an entry claimed ahead, where a running job stays its owner's. None: it was not."""
    if not job.is_ahead:
        return None
    delivered = job._replace(is_ahead=False)
    if job.state == RUNNING:
        dropped = bug is Bug.DROPS_WHAT_IS_DELIVERED_AGAIN
        return delivered._replace(entry=NOBODY if dropped else job.owner)
    return claim(delivered._replace(entry=worker), worker, stamp)


def recover(
    job: Job, worker: int, leases: tuple[bool, bool], stamp: int, bug: Bug | None = None
) -> Job | None:
    """None: nothing to take over. The worker itself has a lease."""
    if job.entry not in (RELEASED, ASIDE) and (job.entry < 0 or leases[job.entry]):
        return None
    return claim(job._replace(entry=worker), worker, stamp, bug)


def set_aside(
    job: Job, worker: int, leases: tuple[bool, bool], bug: Bug | None = None
) -> tuple[Job, Frames] | None:
    """pull and recover of a worker with other files than the job's, which the other worker has.

    None: nothing to set aside. Ends the job where the other worker has no lease.
    """
    other = 1 - worker
    if job.left_to == other:
        return None
    if job.entry == ASIDE:
        if leases[other] or bug is Bug.NO_END_WITHOUT_FILES:
            return None
    elif job.entry not in (NEW, RELEASED) and (job.entry < 0 or leases[job.entry]):
        return None
    if job.state not in (QUEUED, RUNNING):
        return job._replace(entry=NOBODY), ()
    if not leases[other] and bug is not Bug.NO_END_WITHOUT_FILES:
        return latch(job, REPLACED)
    return job._replace(state=QUEUED, owner=NOBODY, entry=ASIDE, left_to=NOBODY), ()


def append(job: Job, words: Words, bug: Bug | None = None) -> tuple[Job, str, Frames]:
    """The job, the verdict ("gap:<n>" with where the log ends), the frames."""
    logged = job.tokens
    if is_lost(job, words.attempt):
        return job, "gone", ()
    is_owner = (job.owner, job.attempt) == (words.worker, words.attempt)
    if job.state in TERMINAL and bug is not Bug.APPEND_AFTER_THE_END:
        again = job.state == FINISHED and is_owner and words.ends and logged == words.tokens
        return job, "ok" if again else "ended", ()
    if not is_owner and bug is not Bug.APPEND_WITHOUT_FENCE:
        return job, "fenced", ()
    news = words.tokens[words.start :]
    if bug is Bug.APPEND_IS_NOT_IDEMPOTENT:
        is_logged = not news
    else:
        same, before = logged == words.tokens, logged == words.tokens[: words.start]
        if bug is Bug.APPEND_WITHOUT_CHAIN:
            same, before = len(logged) == len(words.tokens), True
        is_logged = same
        if not same and len(logged) != words.start:
            return job, f"gap:{len(logged)}", ()
        if not same and not before:
            return job, "diverged", ()
    frames: Frames = ()
    if not is_logged:
        job = job._replace(log=(*job.log, news))
        frames = (Frame(words.start, news, ""),)
    if words.ends:
        job, end = latch(job, FINISHED)
        frames += end
    return job, "ok", frames


def finish(job: Job, bug: Bug | None = None) -> tuple[Job, Frames]:
    """A cancel, from anybody."""
    if job.state in (ABSENT, FORGOTTEN) or (
        job.state in TERMINAL and bug is not Bug.END_AFTER_THE_END
    ):
        return job, ()
    return latch(job, CANCELLED)


def reap(job: Job) -> tuple[Job, Frames]:
    """Past its deadline, or not begun in time; the model lets that be any time."""
    return latch(job, EXPIRED) if job.state in (QUEUED, RUNNING) else (job, ())


def release(job: Job, worker: int, attempt: int, bug: Bug | None = None) -> Job:
    is_owner = (job.owner, job.attempt) == (worker, attempt)
    if job.state != RUNNING or not (is_owner or bug is Bug.RELEASE_WITHOUT_FENCE):
        return job
    return job._replace(state=QUEUED, owner=NOBODY, entry=RELEASED)


def preempt(job: Job, worker: int, attempt: int, bug: Bug | None = None) -> Job:
    """release, of a job that waits for its slot again since a job of an earlier lane has it."""
    given_back = release(job, worker, attempt)
    if given_back == job:
        return job
    if bug is Bug.PREEMPTS_WITHOUT_GIVING_BACK:
        given_back = given_back._replace(entry=NOBODY)
    return given_back._replace(preemptions=job.preemptions + 1)


def retire(job: Job, worker: int) -> Job:
    """Gives back whatever the worker's pending list holds; what it does not run keeps its owner."""
    if job.entry != worker:
        return job
    if job.state == RUNNING and job.owner == worker:
        return release(job, worker, job.attempt)
    return job._replace(entry=RELEASED)


def forget(job: Job) -> Job:
    """The log stays in the model, to compare with; nobody can read it."""
    return job._replace(state=FORGOTTEN) if job.state in TERMINAL else job


def is_lost(job: Job, attempt: int) -> bool:
    """append.lua's and heartbeat.lua's answer to an attempt that the server does not have."""
    return job.state in (ABSENT, FORGOTTEN) or (job.state not in TERMINAL and job.attempt < attempt)


def restore(job: Job, worker: int, copy: Copy, bug: Bug | None = None) -> Job | None:
    """The job, owned by the worker, without a log where it had gone. None: it stays as it is."""
    if job.state == FORGOTTEN and bug is not Bug.RESTORE_WITHOUT_TOMBSTONE:
        return None
    if job.state in TERMINAL:
        return None
    is_gone = job.state in (ABSENT, FORGOTTEN)
    is_later = not is_gone and job.attempt >= copy.attempt
    if is_later and bug is not Bug.RESTORE_WITHOUT_FENCE:
        return None
    log = () if is_gone else job.log
    is_ahead = is_gone or job.is_ahead
    return Job(
        RUNNING,
        worker,
        copy.attempt,
        copy.stamp,
        worker,
        log,
        is_ahead,
        preemptions=job.preemptions,
    )


def is_dropped(job: Job, worker: int, attempt: int) -> bool:
    """heartbeat.lua's answer for a job that the worker runs."""
    return not is_lost(job, attempt) and (job.state != RUNNING or job.owner != worker)

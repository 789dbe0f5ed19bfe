"""What the model knows of the world: one job, two workers, one reader, the network between them.

Only what decides a transition is here. A worker that is paused needs no field: in any order of
steps one side may rest while the others go on, and the loss of its lease is a step of its own. What
a worker has sampled and not said needs none: nobody can tell, so tokens are sampled as they are
said. Text needs none: every token has one byte, the worst case, in which two histories of equal
length have equal cursors and only their tokens (in reality the hash chain) tell them apart.
"""

from __future__ import annotations

from typing import NamedTuple

ABSENT, QUEUED, RUNNING = "absent", "queued", "running"
FINISHED, CANCELLED, EXPIRED = "finished", "cancelled", "expired"
REPLACED = "replaced"  # failed: the model was replaced
TERMINAL = frozenset({FINISHED, CANCELLED, EXPIRED, REPLACED})
FORGOTTEN = "forgotten"  # it has ended and its record was removed: only a tombstone is left

# Who holds the queue entry: a worker's number, or one of these.
NEW, RELEASED, NOBODY, ASIDE = -1, -2, -3, -4

NOTHING_SENT = -1

Tokens = tuple[int, ...]


class Job(NamedTuple):
    """The job at the server: hash, queue entry and log."""

    state: str
    owner: int  # NOBODY before the first claim and after a release
    attempt: int  # the fence
    stamp: int  # which claim of all that ever were this one is; only the model knows it
    # NEW, RELEASED, NOBODY (gone), ASIDE (for the worker with its files) or the consumer whose
    # pending list holds it
    entry: int
    log: tuple[Tokens, ...]  # one part per log entry
    is_ahead: bool = False  # claimed ahead of its turn: the group will deliver its entry (again)
    left_to: int = NOBODY  # the worker that holds its prefix, while the others leave it the job
    preemptions: int = 0  # how often it gave way to a job of an earlier lane

    @property
    def tokens(self) -> Tokens:
        return tuple(token for part in self.log for token in part)


class Copy(NamedTuple):
    """What a worker remembers of its claim: its outbox."""

    attempt: int
    stamp: int
    accepted: int  # tokens that are durable, as far as we know
    tokens: Tokens  # all output that was ever offered, that of earlier attempts included
    sent: int  # where the append ends that is offered until it is settled


class Worker(NamedTuple):
    alive: bool
    lease: bool
    looking: bool  # reconcile has seen the entry in its pending list and will claim it
    copy: Copy | None


class Words(NamedTuple):
    """An append on its way: `tokens[start:]`, after `tokens[:start]`."""

    worker: int
    attempt: int
    stamp: int
    start: int
    tokens: Tokens
    ends: bool


class Frame(NamedTuple):
    """A live frame: tokens from `start` on, or the end at `start`."""

    start: int
    tokens: Tokens
    end: str  # a terminal state; '' for a delta


class Channel(NamedTuple):
    """A reader's subscription. What is published while it is down is lost."""

    up: bool
    resync: bool  # stands before the frames: read the log first
    frames: tuple[Frame, ...]


class Reader(NamedTuple):
    got: Tokens
    end: str  # '', a terminal state, DIVERGED or LOST
    doubts: bool = False  # the log was shorter than the reader when it was read after a loss


DIVERGED, LOST = "diverged", "lost"
USED = "used"


class World(NamedTuple):
    job: Job
    workers: tuple[Worker, Worker]
    reader: Reader
    channel: Channel
    late: Words | None  # an append that its sender gave up on, still under way
    snapshot: Job | str | None  # what a rollback restores; USED after it
    claims: int  # so far; a rollback does not take them back
    faults: int  # that may still happen


class Step(NamedTuple):
    label: str
    world: World
    helps: bool = True  # False: a fault, or an end from outside, on which no progress may depend
    speaker: int = 0  # the stamp of the claim whose words change the job; 0: nobody's


def first_world(faults: int) -> World:
    worker = Worker(alive=True, lease=True, looking=False, copy=None)
    return World(
        job=Job(ABSENT, NOBODY, 0, 0, NOBODY, ()),
        workers=(worker, worker),
        reader=Reader((), ""),
        channel=Channel(up=True, resync=False, frames=()),
        late=None,
        snapshot=None,
        claims=0,
        faults=faults,
    )


class Vocabulary:
    """Numbers the tokens. Each knows what it was sampled after and by which claim: the worst case,
    in which no two claims ever sample the same."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Tokens, int], int] = {}
        self._prefixes: list[Tokens] = []

    def sample(self, prefix: Tokens, stamp: int) -> int:
        number = self._numbers.setdefault((prefix, stamp), len(self._prefixes))
        if number == len(self._prefixes):
            self._prefixes.append(prefix)
        return number

    def is_one_history(self, tokens: Tokens) -> bool:
        """True when each token was sampled after exactly those before it."""
        return all(self._prefixes[token] == tokens[:at] for at, token in enumerate(tokens))

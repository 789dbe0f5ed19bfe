"""SlotShares: fair sharing of running slots (`max_num_seqs`) between tenants and jobs.

A slot is one running sequence. Slots are shared among tenants first and among the jobs of a tenant
next (max-min fairness): of the waiting sequences the one whose tenant holds the fewest slots is
admitted first, and among those of one tenant the one whose job holds the fewest; the policy's rank
breaks ties. When all slots are taken, a waiting sequence preempts one of a tenant, or of another
job of its own tenant, that holds at least two more. Each preemption makes the shares more equal, so
a fixed set of sequences settles after finitely many.

A job of many choices, or a tenant of many jobs, uses every slot while it is alone, and gives slots
up within a few steps when others arrive.

A policy's classes (the lanes of the queue) go before shares: a waiting sequence preempts one of a
lower class whatever its tenant holds. A sequence that gave way MAX_LANE_PREEMPTIONS times is in the
highest class once it runs again, and runs to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from worker.engine.queue import HIGHEST_PRIORITY, Rank, Schedulable, SchedulingPolicy

S = TypeVar("S", bound=Schedulable)

MIN_GAP = 2  # slots; with 1 two sequences would preempt each other in turns
MAX_LANE_PREEMPTIONS = 4  # of a sequence for higher lanes, on all workers


class SlotShares:
    """Counts of the running sequences by tenant and by job."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._rank = policy.rank
        self._of_tenant: Counter[str] = Counter()
        self._of_job: Counter[tuple[str, str]] = Counter()

    def take(self, sequence: Schedulable) -> None:
        """Counts a sequence that starts to run, and is in no queue: its class may change."""
        if sequence.num_lane_preemptions >= MAX_LANE_PREEMPTIONS:
            sequence.priority = HIGHEST_PRIORITY
        self._of_tenant[sequence.tenant] += 1
        self._of_job[sequence.tenant, sequence.job_id] += 1

    def give_back(self, sequence: Schedulable) -> None:
        """Removes a sequence that ran from the counts."""
        self._of_tenant -= Counter((sequence.tenant,))  # which also drops what reaches zero
        self._of_job -= Counter(((sequence.tenant, sequence.job_id),))

    def next_of(self, waiting: Iterable[S]) -> S:
        """Returns the sequence that is admitted first; ValueError if none is waiting.

        A policy's classes (all of a rank but its last number) go before shares.
        """
        return min(waiting, key=self._turn)

    @property
    def num_tenants(self) -> int:
        """Number of tenants that hold a slot."""
        return len(self._of_tenant)

    def claim(self, sequence: Schedulable) -> Rank:
        """Returns the place of a running sequence: the largest gives up its blocks first."""
        rank = self._rank(sequence)
        return (*rank[:-1], self._of_tenant[sequence.tenant], rank[-1])

    def is_due(self, newcomer: Schedulable) -> bool:
        """Returns whether some tenant holds enough slots to give one to `newcomer`."""
        most = max(self._of_tenant.values(), default=0)
        return most >= self._of_tenant[newcomer.tenant] + MIN_GAP

    def lower(self, newcomer: Schedulable, running: Iterable[S]) -> list[S]:
        """Returns the running sequences of lower classes than the newcomer's, in the order in which
        they give way to it: the lowest class first, then the fewest preemptions, then the last."""
        own = self._rank(newcomer)[:-1]
        ranked = [(self._rank(sequence), sequence) for sequence in running]
        ordered = sorted(
            ((*rank[:-1], -sequence.num_lane_preemptions, rank[-1]), sequence)
            for rank, sequence in ranked
            if rank[:-1] > own
        )
        return [sequence for _, sequence in reversed(ordered)]

    def giver(self, newcomer: Schedulable, running: Iterable[S]) -> S | None:
        """Returns the running sequence that gives its slot to `newcomer`, or None.

        It is the last of `running` that belongs to the largest holder: to the largest job of the
        largest other tenant, else to the largest other job of its own tenant. Sequences of a
        smaller `priority` than the newcomer's keep their slots.
        """
        tenant, job = self._held(newcomer)
        others: list[tuple[int, int, int, S]] = []
        siblings: list[tuple[int, int, int, S]] = []
        for place, sequence in enumerate(running):
            if sequence.priority < newcomer.priority:
                continue
            of_tenant, of_job = self._held(sequence)
            if sequence.tenant != newcomer.tenant:
                others.append((of_tenant, of_job, place, sequence))
            elif sequence.job_id != newcomer.job_id:
                siblings.append((of_job, of_tenant, place, sequence))
        for holders, own in ((others, tenant), (siblings, job)):
            if holders and (largest := max(holders))[0] >= own + MIN_GAP:
                return largest[3]
        return None

    def _turn(self, sequence: Schedulable) -> Rank:
        rank = self._rank(sequence)
        tenant, job = self._held(sequence)
        return (*rank[:-1], tenant, job, rank[-1])

    def _held(self, sequence: Schedulable) -> tuple[int, int]:
        key = (sequence.tenant, sequence.job_id)
        return self._of_tenant[sequence.tenant], self._of_job[key]

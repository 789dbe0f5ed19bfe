"""What a walk has submitted, and whether the servers' counters say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.messages import TERMINAL_STATES, Job
from tests.contract.shared.transport.targets import Target

POISON = frozenset({"poison", "worker_lost", "engine_died"})  # each has a dead letter
KEPT_ENDED = 12  # ended jobs that are still looked at; older ones expire


class Ledger:
    """The truth, recomputed from the hashes of all jobs, and kept of those that have expired."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}  # all that are still stored
        self.endings: Counter[tuple[str, str]] = Counter()  # (state, reason) of the others
        self.num_letters_gone = 0  # requeued, thrown away

    async def settle(self, targets: Sequence[Target]) -> list[str]:
        """Compares every target's counters with the truth; returns the jobs that may expire."""
        ended: dict[str, tuple[str, str]] = {}
        for job_id in self.jobs:
            fields = await targets[0].hash(job_id)
            if fields["state"] in TERMINAL_STATES:
                ended[job_id] = (fields["state"], fields["reason"])
        endings = self.endings + Counter(ended.values())
        totals: Counter[str] = Counter()
        num_dead_letters = 0
        for (state, reason), number in endings.items():
            totals[state] += number
            num_dead_letters += number if reason in POISON else 0
        for target in targets:
            await target.assert_counters_true(set(self.jobs), totals)
            num_letters = await target.redis.xlen(target.keys.dead_letters)
            assert num_letters == num_dead_letters - self.num_letters_gone, target.name
        old = list(ended)[:-KEPT_ENDED]
        for job_id in old:
            self.endings[ended[job_id]] += 1
            del self.jobs[job_id]
        return old

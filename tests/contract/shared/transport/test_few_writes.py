"""What every request waits for writes no more than it must."""

from __future__ import annotations

from itertools import pairwise

from tests.support.transport_steps import Steps, calls_of


async def test_jobs_that_follow_each_other_renew_no_life_but_their_own(
    steps: Steps,
) -> None:
    await steps.worker("w1")
    counts = [await calls_of(steps)]
    for _ in range(3):
        await steps.submit()
        counts.append(await calls_of(steps))
    for _ in range(2):
        await steps.pull("w1", 1)
        counts.append(await calls_of(steps))
    renewals = [after["pexpire"] - before["pexpire"] for before, after in pairwise(counts)]
    assert renewals[0] > 1, "all that lists the first job lives as long as it"
    assert renewals[2] == 1, "the job's own"
    assert renewals[3] > 0, "nothing listed what runs"
    assert renewals[4] == 0
    num_sweeps = [count.get("zremrangebyscore", 0) for count in (counts[0], counts[-1])]
    assert num_sweeps[0] == num_sweeps[1], "nothing is swept where no life was renewed"

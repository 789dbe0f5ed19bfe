"""How far the order of several partitions is from that of one queue.

    python -m bench.partition_order

Jobs of eight tenants in three lanes arrive at one Redis while a worker claims one at a time, which
ends at once: as many claims as arrivals, over a backlog of `--waiting` jobs. The same arrivals go
to one partition, to two, and to four, in turn (`spread`) or by chance, as those with a key of
idempotency do (`keys`). Prints a JSON line for each, by the order in which they were claimed: how
many places a job is from its place with one partition, on average and in the worst case; the mean
and the longest wait of each lane, in claims; the part of claims that passed over a job of a higher
lane; and the most by which a tenant's part of the first half of the claims differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench.machine import conditions
from penstock.launcher.redis_server import PrivateServer
from shared.keys import new_job_id
from shared.partitions import PartitionCount
from shared.transport.partitions.transport import open_partitions
from shared.transport.ports.queue import WorkerReport
from tests.support.jobs import MODEL, Stream, accepted, make_job
from tests.support.transport_steps import FINISHED

LANES, TENANTS = (0, 3, 6), 8
LEASE_MS = 600_000


class Claim(NamedTuple):
    """A claimed job, by its number among the arrivals."""

    number: int
    wait: int  # claims since it arrived
    passed: bool  # over a job of a higher lane


class Arrival(NamedTuple):
    lane: int
    tenant: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--waiting", type=int, default=60, help="jobs in the queue")
    arguments = parser.parse_args()
    print(json.dumps(conditions()), flush=True)
    rng = random.Random(1)
    # Half of all jobs are of one tenant.
    arrivals = [
        Arrival(rng.choice(LANES), f"t{max(0, rng.randrange(-TENANTS, TENANTS))}")
        for _ in range(arguments.jobs)
    ]
    with tempfile.TemporaryDirectory() as directory, PrivateServer(Path(directory)) as server:

        def claims(partitions: int, way: str) -> list[Claim]:
            run = _claims(server.url, partitions, way, arrivals, arguments.waiting)
            return asyncio.run(run)

        one = claims(1, "spread")
        _report(1, "spread", one, one, arrivals)
        for partitions in (2, 4):
            for way in ("spread", "keys"):
                _report(partitions, way, claims(partitions, way), one, arrivals)


async def _claims(
    url: str, partitions: int, way: str, arrivals: list[Arrival], num_waiting: int
) -> list[Claim]:
    rng = random.Random(2)
    count = PartitionCount(partitions)
    transport = await open_partitions(
        url, count, namespace=f"order-{partitions}-{way}", affinity_ms=0
    )
    found: list[Claim] = []
    waiting: dict[str, tuple[int, int]] = {}  # number, and claims before it arrived
    try:
        await transport.queue.setup([MODEL])
        await transport.queue.heartbeat(WorkerReport("w", LEASE_MS, (MODEL,), {"step": 1}, ()))
        for number, arrival in enumerate(arrivals):
            chosen = number % partitions if way == "spread" else rng.randrange(partitions)
            job = make_job(new_job_id(chosen), lane=arrival.lane, tenant=arrival.tenant)
            await accepted(transport.store, job)
            waiting[job.job_id] = (number, len(found))
            while len(waiting) > (num_waiting if number < len(arrivals) - 1 else 0):
                (delivery,) = await transport.queue.pull("w", 1, 0)
                number_of, since = waiting.pop(delivery.job.job_id)
                highest = min((arrivals[n].lane for n, _ in waiting.values()), default=LANES[-1])
                passed = highest < arrivals[number_of].lane
                found.append(Claim(number_of, len(found) - since, passed))
                await transport.queue.append(
                    "w", LEASE_MS, [Stream(delivery).append((), "", FINISHED)]
                )
    finally:
        await transport.aclose()
    return found


def _report(
    partitions: int, way: str, claims: list[Claim], one: list[Claim], arrivals: list[Arrival]
) -> None:
    place = {claim.number: at for at, claim in enumerate(one)}
    moved = [abs(at - place[claim.number]) for at, claim in enumerate(claims)]
    waits: dict[int, list[int]] = {lane: [] for lane in LANES}
    for claim in claims:
        waits[arrivals[claim.number].lane].append(claim.wait)
    shares, shares_of_one = (
        Counter(arrivals[claim.number].tenant for claim in order[: len(order) // 2])
        for order in (claims, one)
    )
    line = {
        "partitions": partitions,
        "way": way,
        "moved": [round(mean(moved), 1), max(moved)],
        "waits": {lane: [round(mean(found), 1), max(found)] for lane, found in waits.items()},
        "passed_over_higher": round(mean(claim.passed for claim in claims), 3),
        "share_differs": round(
            max(abs(shares[t] - shares_of_one[t]) for t in shares | shares_of_one)
            / (len(one) // 2),
            3,
        ),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

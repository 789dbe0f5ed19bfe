"""What partitions do on a cluster: submits and appended tokens a second, and Redis' CPU by shard.

    python -m bench.partitions --shards 1 --partitions 1
    python -m bench.partitions --shards 3 --partitions 3 --drivers 3

Starts a cluster of primaries alone, and driver processes that each are a frontend and a worker in
one: they submit jobs, claim them and append their tokens, a step of all jobs in one call, by the
same scripts as a service. Prints one JSON line: jobs and tokens a second, and by shard the CPU
microseconds of the server per token of all, and its share of a core. Where the machine has fewer
cores than servers and drivers, the rate is the machine's; a shard's CPU per token is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from bench.machine import cpu_name
from shared.keys import new_job_id
from shared.messages import (
    Cursor,
    Delta,
    FinishReason,
    Job,
    JobState,
    OnDisconnect,
    SamplingParams,
    Usage,
)
from shared.partitions import PartitionCount
from shared.transport.partitions.transport import open_partitions
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.queue import Append, Delivery, JobEnd, WorkerReport
from shared.transport.wire import chain_hash
from tests.support.redis_topologies import Primaries

MODEL = "qwen3"
LIMITS = AdmissionLimits(max_queued_jobs=10**7, max_queued_tokens=10**10)
LEASE_MS = 600_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=3, help="primaries of the cluster")
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--drivers", type=int, default=2, help="processes that submit and append")
    parser.add_argument("--rows", type=int, default=64, help="jobs that each runs at once")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each output")
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    with Primaries(arguments.shards) as cluster:
        before = [_cpu_s(node.client) for node in cluster.nodes]
        begun_s = time.monotonic()
        with ProcessPoolExecutor(arguments.drivers) as drivers:
            work = partial(drive, cluster.url, arguments)
            counts = list(drivers.map(work, range(arguments.drivers)))
        elapsed_s = time.monotonic() - begun_s
        used_s = [_cpu_s(n.client) - s for n, s in zip(cluster.nodes, before, strict=True)]
    jobs, tokens = (sum(numbers) for numbers in zip(*counts, strict=True))
    row = {
        "jobs_s": round(jobs / arguments.seconds, 1),
        "tokens_s": round(tokens / arguments.seconds),
        "us_per_token": [round(s / tokens * 1e6, 2) for s in used_s],
        "of_a_core": [round(s / elapsed_s, 3) for s in used_s],
    }
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(machine | vars(arguments) | row))


def _cpu_s(client: Any) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


def drive(url: str, arguments: argparse.Namespace, number: int) -> tuple[int, int]:
    """Runs one driver. Returns how many jobs it has ended, and their tokens."""
    return asyncio.run(_drive(url, arguments, f"w{number}"))


async def _drive(url: str, arguments: argparse.Namespace, worker: str) -> tuple[int, int]:
    count = PartitionCount(arguments.partitions)
    transport = await open_partitions(url, count, namespace=f"bench-{worker}", affinity_ms=0)
    deltas = _steps_of(arguments.tokens)
    prompt = tuple(range(1000, 1000 + arguments.prompt))
    num_jobs = 0
    try:
        await transport.queue.setup([MODEL])
        await transport.queue.heartbeat(WorkerReport(worker, LEASE_MS, (MODEL,), {"step": 1}, ()))
        ends_s = time.monotonic() + arguments.seconds
        while time.monotonic() < ends_s:
            for _ in range(arguments.rows):
                job = _new_job(new_job_id(transport.store.partition_for()), prompt)
                await transport.store.submit(job, LIMITS, "")
            deliveries: list[Delivery] = []
            while len(deliveries) < arguments.rows:
                free = arguments.rows - len(deliveries)
                deliveries += await transport.queue.pull(worker, free, 0)
            for step in deltas:
                items = [Append(one.job.job_id, one.attempt, *step) for one in deliveries]
                await transport.queue.append(worker, LEASE_MS, items)
            num_jobs += len(deliveries)
    finally:
        await transport.aclose()
    return num_jobs, num_jobs * arguments.tokens


def _new_job(job_id: str, prompt: tuple[int, ...]) -> Job:
    return Job(
        job_id=job_id,
        model=MODEL,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1000, seed=1),
        kind="chat",
        on_disconnect=OnDisconnect.CONTINUE,
    )


def _steps_of(num_tokens: int) -> list[tuple[Delta, str, str, JobEnd | None]]:
    """Returns the steps of an output of one token each; the last one ends the job."""
    steps: list[tuple[Delta, str, str, JobEnd | None]] = []
    cursor, chain = Cursor(0, 0), ""
    for number in range(num_tokens):
        to = Cursor(cursor.num_tokens + 1, cursor.num_bytes + 4)
        after = chain_hash(chain, [number])
        end = None
        if number == num_tokens - 1:
            usage = Usage(1, num_tokens)
            end = JobEnd(JobState.FINISHED, FinishReason.LENGTH, usage)
        steps.append((Delta(cursor, to, (number,), "word"), chain, after, end))
        cursor, chain = to, after
    return steps


if __name__ == "__main__":
    main()

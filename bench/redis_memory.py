"""What jobs take of Redis' memory: while they wait, while they run, and after their end.

    python -m bench.redis_memory --jobs 2000 --prompt 1000 --tokens 200
    python -m bench.redis_memory --agents 20 --turns 20 --context 100000

With --agents stored Responses of agents: bench/agent_turns.py. An hour has a turn of each of 200
agents every 20 s, all of them kept, and what each of them had before its first turn.

Starts a server of its own, puts jobs into it by the same scripts as a service, and prints one JSON
line: differences of `used_memory` and of the append-only file (INFO) divided by jobs, and MEMORY
USAGE of each key of one job. A log has an entry for each token, as from an engine that publishes
each step. Token ids are drawn from a vocabulary of 150,000; each stands for four bytes of text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Any

from bench.agent_turns import Agent
from bench.machine import cpu_name
from penstock.launcher.redis_server import PrivateServer
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
from shared.transport.connect import RedisTransport, open_transport
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.queue import Append, Delivery, JobEnd, WorkerReport
from shared.transport.wire import chain_hash

MODEL, WORKER = "qwen3", "w1"
VOCABULARY = 150_000
AT_ONCE = 100
FILLING_JOBS = 1000
LIMITS = AdmissionLimits(max_queued_jobs=10**7, max_queued_tokens=10**10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each output")
    parser.add_argument("--agents", type=int, default=0, help="measure so many agents instead")
    parser.add_argument("--turns", type=int, default=20, help="turns of each agent")
    parser.add_argument("--context", type=int, default=100_000, help="bytes as stored, on average")
    parser.add_argument(
        "--style", choices=("whole", "previous"), default="whole", help="what an agent sends"
    )
    parser.add_argument(
        "--unshared", action="store_true", help="store each request whole, as older releases do"
    )
    arguments = parser.parse_args()
    with PrivateServer() as server:
        measured = measure_agents if arguments.agents else measure
        row = asyncio.run(measured(server, arguments))
        print(json.dumps({"cpu": cpu_name()} | {"server": server.version} | vars(arguments) | row))


async def measure(server: PrivateServer, arguments: argparse.Namespace) -> dict[str, Any]:
    transport = await open_transport(server.url)
    rng = random.Random(0)
    try:
        redis: Any = transport.connections.commands
        await redis.config_set("auto-aof-rewrite-percentage", 0)
        await transport.queue.setup([MODEL])
        await beat(transport)
        empty, aof_empty = await used(transport), await logged(transport)
        jobs = [job_of(rng, arguments) for _ in range(arguments.jobs)]
        for job in jobs:
            await transport.store.submit(job, LIMITS, "")
        waiting, aof_waiting = await used(transport), await logged(transport)
        keys_waiting = await key_sizes(transport, jobs[0].job_id)
        deliveries: list[Delivery] = []
        while len(deliveries) < len(jobs):
            await beat(transport)
            deliveries += await transport.queue.pull(WORKER, AT_ONCE, 0)
        claimed = await used(transport)
        for begin in range(0, len(deliveries), AT_ONCE):
            await speak(transport, rng, deliveries[begin : begin + AT_ONCE], arguments.tokens)
        running = await used(transport)
        keys_running = await key_sizes(transport, jobs[0].job_id)
        for begin in range(0, len(deliveries), AT_ONCE):
            await end(transport, deliveries[begin : begin + AT_ONCE], arguments.tokens)
        ended, aof_ended = await used(transport), await logged(transport)
        num = len(jobs)
        return {
            "waiting_bytes_per_job": round((waiting - empty) / num),
            "running_bytes_per_job": round((running - empty) / num),
            "bytes_per_logged_token": round((running - claimed) / num / arguments.tokens, 1),
            "ended_bytes_per_job": round((ended - empty) / num),
            "aof_bytes_per_waiting_job": round((aof_waiting - aof_empty) / num),
            "aof_bytes_per_ended_job": round((aof_ended - aof_empty) / num),
            "keys_waiting": keys_waiting,
            "keys_running": keys_running,
        }
    finally:
        await transport.aclose()


async def measure_agents(server: PrivateServer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns bytes of each turn, as all turns that one hour keeps."""
    transport = await open_transport(server.url)
    rng = random.Random(0)
    try:
        await transport.queue.setup([MODEL])
        await fill_bounded_keys(transport, rng)
        agents = [Agent(rng, arguments) for _ in range(arguments.agents)]
        figures = [await used(transport)]
        for turn in range(arguments.turns):
            for begin in range(0, len(agents), AT_ONCE):
                await take_turn(transport, rng, agents[begin : begin + AT_ONCE], arguments.tokens)
            if turn in (0, arguments.turns - 1):
                figures.append(await used(transport))
        empty, first, last = figures
        for agent in agents:
            await agent.check(transport)
        each = (last - first) / (arguments.turns - 1) / len(agents)
        begun = (first - empty) / len(agents)
        return {
            "bytes_per_agent": round(begun),
            "bytes_per_turn": round(each),
            "gigabytes_per_hour_of_200_agents": round((200 * begun + 36_000 * each) / 1e9, 3),
            "keys_of_last_turn": await key_sizes(transport, agents[0].last_job_id),
        }
    finally:
        await transport.aclose()


async def fill_bounded_keys(transport: RedisTransport, rng: random.Random) -> None:
    """Ends so many small jobs that the lists of ended jobs and the kept prompts do not grow."""
    small = argparse.Namespace(prompt=100, tokens=1)
    for _ in range(FILLING_JOBS // AT_ONCE):
        await beat(transport)
        for _ in range(AT_ONCE):
            await transport.store.submit(job_of(rng, small), LIMITS, "")
        deliveries: list[Delivery] = []
        while len(deliveries) < AT_ONCE:
            deliveries += await transport.queue.pull(WORKER, AT_ONCE, 0)
        await speak(transport, rng, deliveries, 1)
        await end(transport, deliveries, 1)


async def take_turn(
    transport: RedisTransport, rng: random.Random, agents: list[Agent], num_tokens: int
) -> None:
    await beat(transport)
    for agent in agents:
        await transport.store.submit(agent.next_job(), LIMITS, "")
        if agent.earlier:
            await transport.store.renew(agent.earlier)
    deliveries: list[Delivery] = []
    while len(deliveries) < len(agents):
        deliveries += await transport.queue.pull(WORKER, AT_ONCE, 0)
    await speak(transport, rng, deliveries, num_tokens)
    await end(transport, deliveries, num_tokens)


def job_of(rng: random.Random, arguments: argparse.Namespace) -> Job:
    return Job(
        job_id=new_job_id(),
        model=MODEL,
        prompt_token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(arguments.prompt)),
        sampling=SamplingParams(max_tokens=arguments.tokens, seed=rng.randrange(2**31)),
        kind="chat",
        timeout_ms=3_600_000,
        on_disconnect=OnDisconnect.CONTINUE,
    )


async def beat(transport: RedisTransport) -> None:
    await transport.queue.heartbeat(WorkerReport(WORKER, 600_000, (MODEL,), {"step": 1}, ()))


async def speak(
    transport: RedisTransport, rng: random.Random, deliveries: list[Delivery], num_tokens: int
) -> None:
    """Logs the tokens of some jobs, one of each in a call, as an engine's step."""
    chains = dict.fromkeys((delivery.job.job_id for delivery in deliveries), "")
    for place in range(num_tokens):
        appends = []
        for delivery in deliveries:
            name, token = delivery.job.job_id, rng.randrange(VOCABULARY)
            before, chains[name] = chains[name], chain_hash(chains[name], (token,))
            start, to = Cursor(place, 4 * place), Cursor(place + 1, 4 * place + 4)
            delta = Delta(start, to, (token,), "word", None, None)
            appends.append(Append(name, delivery.attempt, delta, before, chains[name], None))
        results = await transport.queue.append(WORKER, 600_000, appends)
        assert {str(result.status) for result in results} == {"ok"}, results
    CHAINS.update(chains)


CHAINS: dict[str, str] = {}  # job id -> the chain of what was logged


async def end(transport: RedisTransport, deliveries: list[Delivery], num_tokens: int) -> None:
    at = Cursor(num_tokens, 4 * num_tokens)
    appends = [
        Append(
            delivery.job.job_id,
            delivery.attempt,
            Delta(at, at, (), "", None, None),
            CHAINS[delivery.job.job_id],
            CHAINS[delivery.job.job_id],
            JobEnd(
                JobState.FINISHED,
                FinishReason.LENGTH,
                Usage(len(delivery.job.prompt_token_ids), num_tokens),
            ),
        )
        for delivery in deliveries
    ]
    results = await transport.queue.append(WORKER, 600_000, appends)
    assert {str(result.status) for result in results} == {"ok"}, results


async def used(transport: RedisTransport) -> int:
    redis: Any = transport.connections.commands
    return int((await redis.info("memory"))["used_memory"])


async def logged(transport: RedisTransport) -> int:
    """Bytes of the append-only file, which is not rewritten meanwhile."""
    redis: Any = transport.connections.commands
    return int((await redis.info("persistence"))["aof_current_size"])


async def key_sizes(transport: RedisTransport, job_id: str) -> dict[str, int]:
    """MEMORY USAGE of the keys of one job."""
    redis: Any = transport.connections.commands
    prefix = transport.keys.prefix
    found = [key.decode() async for key in redis.scan_iter(match=f"*{job_id}", count=10_000)]
    return {
        key.removeprefix(prefix).removesuffix(job_id): await redis.memory_usage(key, samples=0)
        for key in sorted(found)
    }


if __name__ == "__main__":
    main()

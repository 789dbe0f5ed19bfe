"""What the death of each part costs a client: the longest time without a token.

    python -m bench.death_costs --runs 10

Two frontends, two workers (echo runner, a token every 10 ms, the default lease) and a Redis, all of
them processes. In each run four clients read streams; when all of them have read twenty tokens one
part dies and the streams go on to their ends, which are checked. A run counts with the longest
pause of those streams that the death concerned. What it does not show is the prefill of a real
model, which a moved job costs too.

Prints a table, and one JSON line per death with all pauses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from bench.wire_cost import conditions
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.expected import EchoText, random_prompt
from tests.chaos.harness.oracle import check_finished
from tests.support.checkpoints import make_checkpoint
from tests.support.service_processes import WorkerProcess

STREAMS = 4
TOKENS = 200
AFTER_TOKENS = 20
# The service's own defaults, where the tests' are shorter, and steps that last longer.
WORKERS = {
    "ECHO_STEP_MS": 10,
    "LEASE_MS": 10_000,
    "BEAT_INTERVAL_MS": 500,
    "STALL_LIMIT_S": 60,
    "MAX_UNFLUSHED_TOKENS": 256,
}


class Bench:
    """One deployment, made whole again after each run."""

    def __init__(self, deployment: Deployment, echo: EchoText) -> None:
        self._deployment = deployment
        self._echo = echo
        self._rng = random.Random(3)

    async def pause_s(
        self, break_it: Callable[[Sequence[Client]], Awaitable[list[Client]]]
    ) -> float:
        """Of one run. `break_it` returns the clients whom it concerned."""
        # New workers each time: one whose engine has died lately waits before it starts another.
        await self._deployment.leave()
        await self._deployment.heal()
        clients = [
            Client(
                self._deployment.urls,
                random_prompt(self._rng),
                TOKENS,
                first_url=at,
                resumes=True,
            ).start()
            for at in range(STREAMS)
        ]
        try:
            for client in clients:
                await client.tokens(AFTER_TOKENS)
            concerned = await break_it(clients)
            for client in clients:
                check_finished(await client.ended(), self._echo)
            return max(client.reading.longest_wait_s for client in concerned)
        finally:
            for client in clients:
                await client.close()

    async def worker_killed(self, clients: Sequence[Client]) -> list[Client]:
        victim = await self._busiest(clients)
        concerned = await self._of(victim, clients)
        victim.kill()
        return concerned

    async def engine_killed(self, clients: Sequence[Client]) -> list[Client]:
        victim = await self._busiest(clients)
        concerned = await self._of(victim, clients)
        victim.kill_engine()
        return concerned

    async def worker_told_to_end(self, clients: Sequence[Client]) -> list[Client]:
        victim = await self._busiest(clients)
        concerned = await self._of(victim, clients)
        victim.terminate()
        return concerned

    async def frontend_killed(self, clients: Sequence[Client]) -> list[Client]:
        self._deployment.frontends[0].kill()
        return [client for at, client in enumerate(clients) if at % 2 == 0]

    async def redis_killed(self, clients: Sequence[Client]) -> list[Client]:
        self._deployment.server.kill()
        self._deployment.server.start()
        return list(clients)

    async def _busiest(self, clients: Sequence[Client]) -> WorkerProcess:
        shares = [(len(await self._of(w, clients)), w) for w in self._deployment.workers]
        return max(shares, key=lambda share: share[0])[1]

    async def _of(self, worker: WorkerProcess, clients: Sequence[Client]) -> list[Client]:
        concerned = []
        async with self._deployment.transport() as transport:
            for client in clients:
                record = await transport.store.get(client.reading.job_id)
                if record is not None and record.owner == worker.worker_id:
                    concerned.append(client)
        return concerned


async def run(directory: Path, num_runs: int, only: str) -> None:
    checkpoint = make_checkpoint(directory / "tiny")
    deployment = Deployment(directory, checkpoint)
    bench = Bench(deployment, EchoText(checkpoint))
    deaths: dict[str, tuple[Any, dict[str, Any]]] = {
        "worker, SIGKILL": (bench.worker_killed, {}),
        "engine process, SIGKILL": (bench.engine_killed, {}),
        "worker, SIGTERM, time to drain": (bench.worker_told_to_end, {"DRAIN_TIMEOUT_S": 30}),
        "worker, SIGTERM, no time to drain": (bench.worker_told_to_end, {"DRAIN_TIMEOUT_S": 0}),
        "frontend, SIGKILL": (bench.frontend_killed, {}),
        "Redis, SIGKILL, started again": (bench.redis_killed, {}),
    }
    rows = []
    try:
        for name, (break_it, settings) in deaths.items():
            if only not in name:
                continue
            deployment.change_usual(num_workers=2, **{**WORKERS, **settings})
            pauses_s = [await bench.pause_s(break_it) for _ in range(num_runs)]
            rows.append(f"| {name} | {statistics.median(pauses_s):.2f} s | {max(pauses_s):.2f} s |")
            result = [round(pause_s, 3) for pause_s in pauses_s]
            print(json.dumps(conditions() | {"death": name, "pauses_s": result}), flush=True)
    finally:
        deployment.close()
    print("\n| what dies | median | longest |\n| --- | --- | --- |", *rows, sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a row's name")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-deaths-") as directory:
        asyncio.run(run(Path(directory), arguments.runs, arguments.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())

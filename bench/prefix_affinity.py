"""What prefix affinity gains and costs: cached part of later turns and waits, with and without it.

    python -m bench.prefix_affinity --workers 1 2 4 8
    python -m bench.prefix_affinity --workers 4 8 --load 0.8 --slots 64 --seconds 20

Starts Penstock as `make run` does, with echo engines, for each number of workers with
PENSTOCK_AFFINITY_WAIT_MS at its default and again at 0. Conversations of six turns: 200 tokens at
first, then with each turn the answer of 30 tokens and 60 new ones. Without --load 16 conversations
run, each with a pause of up to 0.2 s before a turn. With it turns arrive as a Poisson process at
this part of what the workers' slots serve, each of a conversation that has none in flight. A wait
is from a job's submit to its claim. Prints a JSON line for each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.machine import conditions
from tests.support.launched import Launched

TURNS, FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 6, 200, 60, 30
CONVERSATIONS, MAX_PAUSE_S = 16, 0.2
STEP_MS = 5
LOADED_STEP_MS = 200  # slow: the load fills the slots, not this machine


@dataclass
class Conversation:
    token_ids: list[int]
    turn: int = 0


@dataclass
class Figures:
    prompt_tokens: int = 0  # of second and later turns
    cached_tokens: int = 0
    job_ids: list[str] = field(default_factory=list)


class Client:
    """Asks one service for turns, and sums up what they were."""

    def __init__(self, session: aiohttp.ClientSession, seed: int) -> None:
        self.figures = Figures()
        self._session = session
        self._rng = random.Random(seed)

    def conversation(self) -> Conversation:
        return Conversation(self._tokens(FIRST_TOKENS))

    async def turn(self, conversation: Conversation) -> None:
        body = {
            "prompt": conversation.token_ids,
            "max_tokens": OUTPUT_TOKENS,
            "stream": False,
            "ignore_eos": True,
        }
        async with self._session.post("/generate", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        usage = answer["usage"]
        self.figures.job_ids.append(answer["id"].removeprefix("gen-"))
        if conversation.turn:
            self.figures.prompt_tokens += usage["prompt_tokens"]
            self.figures.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        conversation.turn += 1
        conversation.token_ids += answer["token_ids"] + self._tokens(NEW_TOKENS)

    async def run_side_by_side(self) -> None:
        async def run() -> None:
            conversation = self.conversation()
            for _ in range(TURNS):
                await asyncio.sleep(self._rng.random() * MAX_PAUSE_S)
                await self.turn(conversation)

        await asyncio.gather(*(run() for _ in range(CONVERSATIONS)))

    async def run_poisson(self, per_s: float, seconds: float, num_conversations: int) -> None:
        idle = [self.conversation() for _ in range(num_conversations)]
        loop = asyncio.get_running_loop()
        end_s, next_s = loop.time() + seconds, loop.time()

        async def run(conversation: Conversation) -> None:
            await self.turn(conversation)
            idle.append(conversation if conversation.turn < TURNS else self.conversation())

        async with asyncio.TaskGroup() as group:
            while next_s < end_s:
                await asyncio.sleep(next_s - loop.time())
                at = self._rng.randrange(len(idle)) if idle else None
                group.create_task(run(self.conversation() if at is None else idle.pop(at)))
                next_s += self._rng.expovariate(per_s)

    async def waits_ms(self) -> list[int]:
        waits = []
        for job_id in self.figures.job_ids:
            async with self._session.get(f"/v1/jobs/{job_id}") as response:
                response.raise_for_status()
                waits.append((await response.json())["timings"]["queue_ms"])
        return sorted(waits)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(100, 4000) for _ in range(count)]


def main() -> None:
    arguments = _arguments()
    print(json.dumps(conditions()), flush=True)
    for turn in range(arguments.turns):
        for workers in arguments.workers:
            waits = ["", "0"] if turn % 2 == 0 else ["0", ""]
            for affinity_wait_ms in waits:
                print(json.dumps(_run(arguments, workers, affinity_wait_ms, turn)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--load", type=float, help="part of the slots, as 0.8")
    parser.add_argument("--slots", type=int, default=16, help="of each worker")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=1, help="how often all of it is measured")
    return parser.parse_args()


def _run(
    arguments: argparse.Namespace, workers: int, affinity_wait_ms: str, seed: int
) -> dict[str, Any]:
    step_ms, slots = LOADED_STEP_MS if arguments.load else STEP_MS, arguments.slots
    settings = {
        "RUNNER": "echo",
        "ECHO_STEP_MS": str(step_ms),
        "WORKERS": str(workers),
        "BLOCK_SIZE": "16",
        "NUM_KV_BLOCKS": str(256 * slots),  # 4096 tokens for each slot
        "MAX_NUM_SEQS": str(slots),
    }
    if affinity_wait_ms:
        settings["AFFINITY_WAIT_MS"] = affinity_wait_ms
    per_s = (arguments.load or 0) * workers * slots / (OUTPUT_TOKENS * step_ms / 1000)

    async def measure(base_url: str) -> dict[str, Any]:
        async with aiohttp.ClientSession(base_url) as session:
            client = Client(session, seed)
            if arguments.load:
                await client.run_poisson(per_s, arguments.seconds, 2 * workers * slots)
            else:
                await client.run_side_by_side()
            waits = await client.waits_ms()
        figures = client.figures
        return {
            "workers": workers,
            "affinity": affinity_wait_ms != "0",
            "jobs": len(waits),
            "cached_later": round(figures.cached_tokens / max(1, figures.prompt_tokens), 3),
            "wait_ms_p50": waits[len(waits) // 2],
            "wait_ms_p99": waits[min(len(waits) - 1, len(waits) * 99 // 100)],
        }

    with (
        tempfile.TemporaryDirectory() as directory,
        Launched(Path(directory), settings, is_forked=False) as penstock,
    ):
        return asyncio.run(measure(penstock.base_url))


if __name__ == "__main__":
    main()

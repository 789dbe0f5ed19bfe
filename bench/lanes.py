"""First tokens of interactive requests beside a batch that holds every slot, and what it costs it.

    python -m bench.lanes --seconds 40 --rate 1.5

Starts a whole service with the echo runner at a fixed time per step, and measures three phases of
the same length: interactive requests alone (Poisson arrivals), a batch alone, and both. Prints one
JSON line: first-token times of each phase in ms, tokens per second of the batch, preemptions, and
the two ratios. With --model, a checkpoint's own runner computes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.load_client import new_session
from bench.machine import conditions
from tests.support.launched import Launched, free_port

SETTLE_S = 4.0  # until the batch holds every slot


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=1.5, help="interactive requests a second")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--row-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="of an interactive request")
    parser.add_argument("--prompt-letters", type=int, default=900, help="likewise")
    parser.add_argument("--model", default="", help="a checkpoint; empty: the echo runner")
    arguments = parser.parse_args()
    metrics_port = free_port()
    env = {
        "MAX_NUM_SEQS": str(arguments.slots),
        "METRICS_PORT": str(metrics_port),
        "LOG_LEVEL": "WARNING",
        "MAX_QUEUE_SHARE_PER_TENANT": "1",
    }
    if arguments.model:
        env |= {"MODEL": arguments.model}
    else:
        env |= {"RUNNER": "echo", "ECHO_STEP_MS": str(arguments.step_ms)}
    with (
        tempfile.TemporaryDirectory() as place,
        Launched(Path(place), env, is_forked=False) as penstock,
    ):
        row = asyncio.run(Phases(penstock.base_url, metrics_port, arguments).run())
    print(json.dumps(conditions() | vars(arguments) | row))


class Phases:
    """The three phases of one service."""

    def __init__(self, base_url: str, metrics_port: int, arguments: argparse.Namespace) -> None:
        self._base_url = base_url
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._arguments = arguments
        self._rng = random.Random(1)

    async def run(self) -> dict[str, Any]:
        async with new_session() as self._session:
            self._model = await self._name_of_model()
            await self._interactive(2.0)
            idle_ms, _ = await self._interactive(self._arguments.seconds)
            await self._start_batch()
            await asyncio.sleep(SETTLE_S)
            before, begin_s = await self._counters(), time.perf_counter()
            await asyncio.sleep(self._arguments.seconds)
            alone, alone_s = await self._counters(), time.perf_counter() - begin_s
            begin_s = time.perf_counter()
            flood_ms, num_tokens = await self._interactive(self._arguments.seconds)
            both, both_s = await self._counters(), time.perf_counter() - begin_s
        alone_tok_s = (alone["generation"] - before["generation"]) / alone_s
        both_tok_s = (both["generation"] - alone["generation"] - num_tokens) / both_s
        return {
            "idle_ttft_ms": _percentiles(idle_ms),
            "flood_ttft_ms": _percentiles(flood_ms),
            "p99_ratio": round(_percentiles(flood_ms)["p99"] / _percentiles(idle_ms)["p99"], 2),
            "batch_tok_s": round(alone_tok_s, 1),
            "batch_tok_s_beside": round(both_tok_s, 1),
            "batch_ratio": round(both_tok_s / alone_tok_s, 3),
            "preemptions": both["preemptions"] - alone["preemptions"],
            "uncached_tokens": both["queries"] - alone["queries"] - both["hits"] + alone["hits"],
        }

    async def _name_of_model(self) -> str:
        async with self._session.get(f"{self._base_url}/v1/models") as answer:
            return str((await answer.json())["data"][0]["id"])

    async def _start_batch(self) -> None:
        body = {"model": self._model, "max_tokens": self._arguments.row_tokens, "ignore_eos": True}
        lines = (
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/completions",
                "body": body | {"prompt": self._prompt(24)},
            }
            for i in range(100 * self._arguments.slots)
        )
        form = aiohttp.FormData({"purpose": "batch"})
        content = "\n".join(map(json.dumps, lines)).encode()
        form.add_field("file", content, filename="rows.jsonl")
        async with self._session.post(f"{self._base_url}/v1/files", data=form) as answer:
            file_id = (await answer.json())["id"]
        request = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        async with self._session.post(f"{self._base_url}/v1/batches", json=request) as answer:
            answer.raise_for_status()

    async def _interactive(self, seconds: float) -> tuple[list[float], int]:
        """Returns the first-token times in ms of requests that arrive in so many seconds, and the
        number of their tokens."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            until_s = time.perf_counter() + seconds
            while True:
                await asyncio.sleep(self._rng.expovariate(self._arguments.rate))
                if time.perf_counter() >= until_s:
                    break
                tasks.append(group.create_task(self._first_token_ms()))
        return [task.result() for task in tasks], len(tasks) * self._arguments.tokens

    async def _first_token_ms(self) -> float:
        body = {
            "model": self._model,
            "prompt": self._prompt(self._arguments.prompt_letters),
            "max_tokens": self._arguments.tokens,
            "ignore_eos": True,
            "stream": True,
        }
        begin_s, first_ms = time.perf_counter(), 0.0
        async with self._session.post(f"{self._base_url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data:") and not first_ms:
                    first_ms = 1000 * (time.perf_counter() - begin_s)
        return first_ms

    def _prompt(self, num_letters: int) -> str:
        return " ".join(self._rng.choice("abcdefgh") * 3 for _ in range(num_letters // 3))

    async def _counters(self) -> dict[str, float]:
        async with self._session.get(self._metrics_url) as answer:
            text = await answer.text()
        found = dict.fromkeys(_METRICS, 0.0)
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            for key, metric in _METRICS.items():
                if name.partition("{")[0] == metric:
                    found[key] += float(value)
        return found


_METRICS = {
    "generation": "penstock:generation_tokens_total",
    "preemptions": "penstock:num_preemptions_total",
    "queries": "penstock:prefix_cache_queries_total",
    "hits": "penstock:prefix_cache_hits_total",
}


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 1)
        for q in (50, 90, 99)
    } | {"max": round(ordered[-1], 1), "n": len(ordered)}


if __name__ == "__main__":
    main()

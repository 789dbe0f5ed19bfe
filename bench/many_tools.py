"""What requests with many tools cost, and those beside them.

    python -m bench.many_tools --tools 0 128 1024 --at-once 1 8 --runs 24

Starts a whole service with the echo runner and a checkpoint with Hermes' tools. For each number of
tools and of requests at once it sends streamed chat requests, all with the same tools, and looks at
/health meanwhile. Prints one JSON line each: milliseconds until the first event of the very first
request, until those of the others and until an answer of /health, median and worst.
`--vocabulary`: tokens of a vocabulary of random merges, in place of the checkpoint's own small one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.machine import cpu_name
from tests.neighbours.joining_model import write_tokenizer
from tests.support.launched import Launched
from tests.support.tool_models import HERMES_TEMPLATE, make_hermes_checkpoint

CONTEXT_TOKENS, NUM_KV_BLOCKS = 1_000_000, 250_000
LOOK_EVERY_S = 0.005
MODEL = "checkpoint"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=int, nargs="+", default=[0, 128, 1024])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", type=int, default=24, help="requests of each row")
    parser.add_argument("--vocabulary", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        checkpoint = make_hermes_checkpoint(
            Path(place) / MODEL, max_position_embeddings=CONTEXT_TOKENS
        )
        if arguments.vocabulary:
            config = json.loads((checkpoint / "config.json").read_text())
            write_tokenizer(checkpoint, arguments.vocabulary, HERMES_TEMPLATE)
            config |= {"vocab_size": arguments.vocabulary, "eos_token_id": 0}
            (checkpoint / "config.json").write_text(json.dumps(config))
            (checkpoint / "generation_config.json").unlink()
        env = {"RUNNER": "echo", "MODEL": str(checkpoint), "LOG_LEVEL": "WARNING"}
        env |= {"NUM_KV_BLOCKS": str(NUM_KV_BLOCKS), "MAX_NUM_BATCHED_TOKENS": str(CONTEXT_TOKENS)}
        with Launched(Path(place), env, is_forked=False) as penstock:
            asyncio.run(_measure(penstock.base_url, arguments))


async def _measure(base_url: str, arguments: argparse.Namespace) -> None:
    facts = {"cpu": cpu_name(), "cores": os.cpu_count()}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(base_url, timeout=timeout) as session:
        for num_tools in arguments.tools:
            body = _body(num_tools)
            first_s = await _first_event_s(session, body)
            for at_once in arguments.at_once:
                row = await _row(session, body, at_once, arguments.runs)
                load = round(os.getloadavg()[0], 1)
                print(
                    json.dumps(
                        facts
                        | {"tools": num_tools, "kib": len(body) >> 10, "at_once": at_once}
                        | {"load": load, "very_first_ms": round(1e3 * first_s)}
                        | row
                    ),
                    flush=True,
                )


async def _row(
    session: aiohttp.ClientSession, body: bytes, at_once: int, runs: int
) -> dict[str, Any]:
    events_s: list[float] = []
    health_s: list[float] = []
    left = iter(range(runs))

    async def ask() -> None:
        for _ in left:
            events_s.append(await _first_event_s(session, body))

    async def look() -> None:
        while True:
            begin_s = time.perf_counter()
            async with session.get("/health") as answer:
                await answer.read()
            health_s.append(time.perf_counter() - begin_s)
            await asyncio.sleep(LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(ask() for _ in range(at_once)))
    looking.cancel()
    return {"first_event_ms": _figures(events_s), "health_ms": _figures(health_s)}


async def _first_event_s(session: aiohttp.ClientSession, body: bytes) -> float:
    begin_s = time.perf_counter()
    headers = {"content-type": "application/json"}
    async with session.post("/v1/chat/completions", data=body, headers=headers) as answer:
        first = await answer.content.readany()
        took_s = time.perf_counter() - begin_s
        if answer.status != 200:
            raise RuntimeError(f"refused: {first[:300]!r}")
        await answer.read()
    return took_s


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(1e3 * statistics.median(seconds), 1),
        "max": round(1e3 * max(seconds), 1),
        "n": len(seconds),
    }


def _body(num_tools: int) -> bytes:
    tools = [{"type": "function", "function": _function(i)} for i in range(num_tools)]
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Open the gate."}],
        "max_tokens": 2,
        "stream": True,
    }
    return json.dumps(chat | ({"tools": tools} if tools else {})).encode()


def _function(index: int) -> dict[str, Any]:
    """About 400 bytes, as most tools of MCP servers have."""
    return {
        "name": f"gate_{index}_set_level",
        "description": f"Sets how far gate {index} of the dam is open, and returns its level.",
        "parameters": {
            "type": "object",
            "properties": {
                "level": {"type": "integer", "description": "How far, in percent."},
                "reason": {"type": "string", "description": "Who asked for it, and why."},
                "unit": {"type": "string", "enum": ["percent", "metres"]},
            },
            "required": ["level"],
        },
    }


if __name__ == "__main__":
    main()

"""Chunks a second through the whole path with the echo engine, beside a bare relay's.

    python -m bench.relay --streams 64 --tokens 400 --runs 3

The bare relay is bench/bare_relay.py, fed by pipelined PUBLISHes: pub/sub to SSE in one
process and nothing else. Penstock's figure goes through submit, queue, worker, engine process, log,
pub/sub and one frontend. Both are read by the same client, in turns. Prints one JSON line: medians.
A chunk is one SSE event; `tokens_s` counts tokens, of which a chunk may hold several when the
machine cannot keep up. Several events may share a write to the socket, on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from bench.machine import cpu_name
from bench.stream_reader import read_stream
from penstock.launcher.redis_server import PrivateServer
from tests.support.launched import REPOSITORY, Launched, free_port

PAYLOAD = b'{"text":" token","index":0,"finish_reason":null}'
CONNECT_TRIES = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    print(json.dumps(asyncio.run(_measure(parser.parse_args()))))


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    env = {
        "RUNNER": "echo",
        "MAX_NUM_SEQS": str(arguments.streams),
        "MAX_NUM_BATCHED_TOKENS": "4096",
        "LOG_LEVEL": "WARNING",
    }
    bare: list[float] = []
    ours: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory() as place,
        Launched(Path(place), env, is_forked=False) as penstock,
    ):
        async with _bare_relay() as (port, channel):
            for _ in range(arguments.runs):
                bare.append(await _through_relay(port, channel, arguments))
                ours.append(await _through_penstock(penstock.port, arguments))
    chunks_s, tokens_s = (statistics.median(column) for column in zip(*ours, strict=True))
    bare_s = statistics.median(bare)
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "bare_chunks_s": round(bare_s),
        "chunks_s": round(chunks_s),
        "tokens_s": round(tokens_s),
        "chunks_of_bare": round(chunks_s / bare_s, 3),
        "tokens_of_bare": round(tokens_s / bare_s, 3),
    }


@contextlib.asynccontextmanager
async def _bare_relay() -> AsyncIterator[tuple[int, redis.Redis]]:
    port, server = free_port(), PrivateServer()
    url = await asyncio.to_thread(server.start)
    options = ["--port", str(port), "--log-level", "warning", "--no-access-log"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "uvicorn", "bench.bare_relay:app", "--factory", *options),
        *("--loop", "uvloop", "--http", "httptools"),
        env={**os.environ, "RELAY_REDIS_URL": url},
        cwd=REPOSITORY,
    )
    try:
        await _connectable(port)
        async with redis.Redis.from_url(url) as client:
            yield port, client
    finally:
        process.terminate()
        await process.wait()
        await asyncio.to_thread(server.stop)


async def _connectable(port: int) -> None:
    for _ in range(CONNECT_TRIES):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("the bare relay did not start")


async def _through_relay(port: int, client: redis.Redis, arguments: argparse.Namespace) -> float:
    names = [f"c{i}" for i in range(arguments.streams)]
    path = f"/relay/{arguments.tokens}?channel="
    tasks = [asyncio.create_task(read_stream(port, "GET", path + name)) for name in names]
    listening = {name.encode(): 1 for name in names}
    while dict(await client.pubsub_numsub(*names)) != listening:
        await asyncio.sleep(0.05)
    begin_s = time.perf_counter()
    for _ in range(arguments.tokens):
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.publish(name, PAYLOAD)
        await pipe.execute()
    reads = await asyncio.gather(*tasks)
    return sum(read.num_chunks for read in reads) / (time.perf_counter() - begin_s)


async def _through_penstock(port: int, arguments: argparse.Namespace) -> tuple[float, float]:
    body = json.dumps(
        {
            "model": "penstock-demo",
            "prompt": list(range(300, 330)),
            "max_tokens": arguments.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    begin_s = time.perf_counter()
    reads = await asyncio.gather(
        *(read_stream(port, "POST", "/v1/completions", body) for _ in range(arguments.streams))
    )
    seconds = time.perf_counter() - begin_s
    num_chunks = sum(read.num_chunks for read in reads)
    return num_chunks / seconds, arguments.streams * arguments.tokens / seconds


if __name__ == "__main__":
    main()
